"""Matmuls in eight bits: values in a float8 type, a scale a row on either side. Of target and drafter alike."""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_LARGEST = 448.0
FP8_CAPABILITY = (8, 9)  # first compute capability with fp8 matmuls


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 values [R, K] and float32 scales [R, 1] of a matrix [R, K]; their product is the matrix, rounded.

    Three passes over the matrix where it is not compiled. Nothing is clamped: the largest value comes out at 448 or a
    float32 rounding beside it, which e4m3 rounds to 448.
    """
    scale = scale_of(torch.linalg.vector_norm(x, torch.inf, dim=-1, keepdim=True).float())
    return (x / scale).to(FP8), scale


def scale_of(largest: Tensor) -> Tensor:
    """What values are divided by to be e4m3 ones, from the largest magnitude among them."""
    return largest.clamp_min(1e-12) / FP8_LARGEST


def scaled_matmul(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype, *, fast: bool = True
) -> Tensor:
    """[T, N] of quantised x [T, K] with scales [T, 1] and weight [N, K] with scales [N, 1].

    fast: products are summed in the matrix unit's own 22 bits, as engines do, not in float32 every few steps.
    """
    if not x.is_cuda:
        return plain_scaled_matmul(x, x_scale, weight, weight_scale, dtype)
    product = torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        x, weight.t(), scale_a=x_scale, scale_b=weight_scale.t(), out_dtype=torch.bfloat16, use_fast_accum=fast
    )
    return product.to(dtype)


def plain_scaled_matmul(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`scaled_matmul` on the values that the quantised ones stand for, in float32."""
    return ((x.float() * x_scale) @ (weight.float() * weight_scale).t()).to(dtype)
