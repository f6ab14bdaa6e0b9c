"""The trainer: feed, drafter, losses, optimiser, checkpoints, evaluation and export."""
