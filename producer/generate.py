"""A target loaded here, which answers in batches: transformers' own `generate`, rows padded on the left.

Every prompt is rendered by the same template code that prepares rows (`chat.py`), and every answer is put back into the
conversation and rendered again: where that does not give the prompt and the answer as the target wrote it, letter for
letter, the row is refused, as it would teach a drafter what the target never says.

Padding must not change an answer. A start-up check compares padded rows with each alone; a target that fails it answers
prompts of one length at a time.
"""

import copy
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.utils import logging as transformers_logging

from ..common.errors import ConfigError
from ..common.forms import Encoded, Refused, read_open
from ..common.loading import compute_dtype, load_causal_lm, stop_tokens
from ..common.reference import TOLERANCE
from ..common.target_info import TargetInfo, target_info
from .chat import ChatEncoder
from .prepare import load_format
from .replies import Question, Reply, Sampling

log = logging.getLogger(__name__)

CHECK_LENGTHS = (9, 21, 14)  # rows of the padding check, in tokens
_REPLACEMENT = "\ufffd"  # what a decoder makes of a character that is not whole


class Prompt(NamedTuple):
    """A question as the target reads it."""

    text: str
    tokens: list[int]


class LocalTarget:
    """A target that answers questions. `batch_size` shrinks when the device's memory is short."""

    def __init__(
        self,
        model: PreTrainedModel,
        encoder: ChatEncoder,
        info: TargetInfo,
        stops: Sequence[int],
        sampling: Sampling,
        batch_size: int,
    ) -> None:
        self.model = model
        self.encoder = encoder
        self.info = info
        self.batch_size = batch_size
        self.stops = frozenset(stops)
        self.config = generation_config(model, self.stops, sampling)
        self.pads = True
        if sampling.seed is not None:
            torch.manual_seed(sampling.seed)

    @classmethod
    def load(
        cls,
        path: str,
        *,
        sampling: Sampling,
        template_kwargs: dict[str, Any],
        dtype: str = "bfloat16",
        device: str | None = None,
        batch_size: int = 32,
        trust_remote_code: bool = False,
    ) -> "LocalTarget":
        """Loads a folder, GGUF file or hub id and checks its padding. device: default cuda if there is one; a CPU
        without fast bfloat16 computes in float32. Raises ConfigError."""
        from transformers import AutoTokenizer

        transformers_logging.set_verbosity_error()
        info = target_info(path, trust_remote_code)
        encoder = ChatEncoder(load_format(path, trust_remote_code), supervise="last", template_kwargs=template_kwargs)
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        model = load_causal_lm(info.path, compute_dtype(dtype, device), device, trust_remote_code)
        stops = stop_tokens(model, AutoTokenizer.from_pretrained(info.path, trust_remote_code=trust_remote_code))
        if not stops:
            raise ConfigError(f"target.path: {path} names no end token: its answers would never end")
        target = cls(model, encoder, info, stops, sampling, batch_size)
        target.check_padding()
        return target

    def described(self) -> str:
        """Sampling as it will be, in a few words."""
        config: Any = self.config
        if not config.do_sample:
            return "greedy"
        found = [f"temperature {config.temperature:g}"]
        if config.top_p is not None and config.top_p < 1:
            found.append(f"top_p {config.top_p:g}")
        return ", ".join(found + ([f"top_k {config.top_k}"] if config.top_k else []))

    def prompt(self, question: Question) -> Prompt:
        """Text and tokens of a question, the generation prompt included. Raises Refused if it can't be asked."""
        text = self.encoder.prompt_text(read_open(question.to_row()))
        tokens = self.encoder.tokenizer.encode(text, add_special_tokens=False).ids
        room, wanted = self.info.max_position_embeddings, len(tokens) + self.config.max_new_tokens
        if room and wanted > room:
            detail = f"{len(tokens)} tokens, and {self.config.max_new_tokens} new ones, of {room}"
            raise Refused("the prompt leaves no room for an answer in the target's context", detail)
        return Prompt(text, tokens)

    def batches(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Indices of prompts that go together, the longest first: of like length, or of one where padding is out."""
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i].tokens))
        found: list[list[int]] = []
        for index in order:
            last = found[-1] if found else []
            fits = 0 < len(last) < self.batch_size
            if fits and (self.pads or len(prompts[last[0]].tokens) == len(prompts[index].tokens)):
                last.append(index)
            else:
                found.append([index])
        return found

    def answer(self, questions: Sequence[Question], prompts: Sequence[Prompt]) -> list[Reply | Refused]:
        """The replies to one batch. Short of memory it halves the batch, for good; a single row then is refused."""
        if len(questions) > (most := self.batch_size):  # it has shrunk since the batches were made
            return self.answer(questions[:most], prompts[:most]) + self.answer(questions[most:], prompts[most:])
        try:
            answers = self.generate([prompt.tokens for prompt in prompts])
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            half = len(questions) // 2
            if not half:
                return [Refused("the device's memory is too small for it", f"{len(prompts[0].tokens)} tokens")]
            self.batch_size = half
            log.warning("the device's memory is short: from now on %d rows at a time", half)
            return self.answer(questions[:half], prompts[:half]) + self.answer(questions[half:], prompts[half:])
        return [self._reply(*each) for each in zip(questions, prompts, answers, strict=True)]

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """New tokens of each prompt, up to and with the first end token."""
        made: Any = self._run(prompts, self.config)
        new = made[:, max(map(len, prompts)) :].tolist()
        return [self._until_stop(tokens) for tokens in new]

    def check_padding(self) -> None:
        """Finds out whether rows padded on the left give the logits they give alone, for a prompt and one new token."""
        draw = torch.Generator().manual_seed(0)
        special = self.stops | set(self.encoder.end_tokens.values())
        plain = torch.tensor([i for i in sorted(self.encoder.tokenizer.get_vocab().values()) if i not in special])
        rows = [plain[torch.randint(0, len(plain), (n,), generator=draw)].tolist() for n in CHECK_LENGTHS]
        together = self._logits(rows)
        alone = torch.cat([self._logits([row]) for row in rows])
        error = ((together - alone).norm(dim=-1) / alone.norm(dim=-1)).max()
        self.pads = bool(error <= TOLERANCE[self.model.dtype])
        if not self.pads:
            log.warning("padding changes this target's answers (error %.2g): one prompt length at a time", error)

    @torch.inference_mode()
    def _logits(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """[rows, V] float32 logits after each prompt and one token of our choice, as `generate` computes them."""
        config = copy.deepcopy(self.config)
        config.update(do_sample=False, max_new_tokens=2, output_logits=True, return_dict_in_generate=True)
        first = [prompt[0] for prompt in prompts]
        chosen = _Chosen(torch.tensor(first, device=self.model.device))
        made: Any = self._run(prompts, config, logits_processor=LogitsProcessorList([chosen]))
        return made.logits[-1].float()

    def _run(self, prompts: Sequence[Sequence[int]], config: Any, **options: Any) -> Any:
        longest = max(map(len, prompts))
        ids = torch.full((len(prompts), longest), config.pad_token_id, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(prompts):
            ids[row, longest - len(tokens) :] = torch.tensor(tokens, dtype=torch.long)
            mask[row, longest - len(tokens) :] = 1
        device, model = self.model.device, self.model
        generate: Any = model.generate
        return generate(input_ids=ids.to(device), attention_mask=mask.to(device), generation_config=config, **options)

    def _until_stop(self, tokens: list[int]) -> list[int]:
        end = next((at for at, token in enumerate(tokens) if token in self.stops), None)
        return tokens if end is None else tokens[: end + 1]

    def _reply(self, question: Question, prompt: Prompt, tokens: list[int]) -> Reply | Refused:
        finished = tokens[-1] in self.stops
        try:
            text = self._decoded(prompt.tokens, tokens[:-1] if finished else tokens, finished)
            # Where the prompt opens the thinking the row says so, as `prepare` can't know it from the answer.
            content = f"<think>\n{text}" if prompt.text.rstrip().endswith("<think>") else text
            self._check(question, content, text, finished)
        except Refused as refused:
            return refused
        return Reply({"role": "assistant", "content": content}, finished, len(tokens))

    def _decoded(self, prompt: list[int], tokens: list[int], finished: bool) -> str:
        """The text of new tokens, decoded after the prompt's last one: some decoders strip a leading space."""
        decode = self.encoder.tokenizer.decode
        before = prompt[-1:]
        context = decode(before, skip_special_tokens=False)
        text = decode(before + tokens, skip_special_tokens=False).removeprefix(context)
        while not finished and tokens and text.endswith(_REPLACEMENT):  # the limit fell inside a character
            tokens = tokens[:-1]
            text = decode(before + tokens, skip_special_tokens=False).removeprefix(context)
        if not text.strip():
            raise Refused("the answer is empty")
        return text

    def _check(self, question: Question, content: str, text: str, finished: bool) -> None:
        """Raises Refused unless a row with the answer `content` gives back what the target read and wrote."""
        row = question.to_row() | {"finished": finished}
        row["messages"] = [*question.messages, {"role": "assistant", "content": content}]
        if not self.encoder.answer_text(row).startswith(text.rstrip()):
            raise Refused("the chat template does not give the answer back as the target wrote it")
        encoded = self.encoder.encode(row)[-1]
        if not isinstance(encoded, Encoded):
            raise encoded


class _Chosen(LogitsProcessor):
    """A logits processor that makes `generate` take given tokens [rows]."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, -torch.inf).scatter(1, self.tokens[:, None], 0.0)


def generation_config(model: PreTrainedModel, stops: Sequence[int] | frozenset[int], sampling: Sampling) -> Any:
    """The target's own generation config, which is what engines serve it with, and the choices made over it.

    Where neither names a temperature it is 1, as in vLLM and SGLang; transformers' own default is greedy.
    `generate` fills what is None from the model again, so every choice is spelt out.
    """
    config: Any = copy.deepcopy(model.generation_config)
    temperature = sampling.temperature
    if temperature is None:
        temperature = 1.0 if config.temperature is None else config.temperature
    top_p = sampling.top_p if sampling.top_p is not None else config.top_p
    top_k = sampling.top_k if sampling.top_k is not None else config.top_k
    config.update(
        max_new_tokens=sampling.max_new_tokens,
        max_length=None,
        eos_token_id=sorted(stops),
        pad_token_id=min(stops),
        num_return_sequences=1,
        do_sample=temperature > 0,
        temperature=max(temperature, 1e-30) if temperature > 0 else 1.0,
        top_p=1.0 if top_p is None else top_p,
        top_k=0 if top_k is None else top_k,
    )
    return config
