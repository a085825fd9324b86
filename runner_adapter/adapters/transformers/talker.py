"""A talker's frames: residual codes of several requests in one call, each drawn from its request's own generator."""

from __future__ import annotations

from typing import Any

import torch

from connector import errors
from runner_adapter.adapters.transformers.packing import ByRow, Generators


class HfTalker:
    """A talker of the library (Qwen3-Omni's) with the hook that `runner_adapter.talker` calls at decode rows.

    `exact=True` predicts each row alone, as the library does: equal bits are certain. Otherwise all rows of a call
    are one batch of the code predictor (see `packing`).
    """

    talker_mtp_accepts_per_row_generators = True

    def __init__(self, model: Any, *, exact: bool = True) -> None:
        self._model = model
        self._exact = exact
        self.mtp_hidden_size = int(model.config.text_config.hidden_size)

    @torch.no_grad()
    def talker_mtp(
        self,
        input_ids: torch.Tensor,
        inputs_embeds: torch.Tensor | None,
        last_hidden: torch.Tensor,
        text_step: torch.Tensor,
        *,
        do_sample: bool = True,
        generator: torch.Generator | None = None,
        generators: Generators | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The frame of each row and the embeds that are fed for it: ([rows, width], int64 [rows, groups]).

        `input_ids` int [rows] is each request's last id, `last_hidden` [rows, width] its last hidden state behind the
        last layer, `text_step` [rows, width] the thinker's projected row (or the end's, or padding's) of this step.
        `inputs_embeds` is not read: the library embeds the ids itself. Rows draw from `generators`, or one row from
        `generator`; without them from torch's own. UsageError if there are not as many as rows.
        """
        rows = len(input_ids)
        own = list(generators) if generators is not None else [generator] if generator is not None else [None] * rows
        if len(own) != rows:
            raise errors.UsageError("each row of the talker has one generator", rows=rows, generators=len(own))
        # On the module, and read by the next call: it was the last request's, greedy or not.
        self._model.code_predictor.generation_config.do_sample = do_sample
        size = 1 if self._exact else max(rows, 1)
        parts = [
            self._predict(
                input_ids[i : i + size], last_hidden[i : i + size], text_step[i : i + size], own[i : i + size]
            )
            for i in range(0, rows, size)
        ]
        return torch.cat([embeds for embeds, _ in parts]), torch.cat([codes for _, codes in parts])

    def _predict(
        self, ids: torch.Tensor, hidden: torch.Tensor, text_step: torch.Tensor, generators: Generators
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with ByRow(generators):
            # The rows' text steps are a trailing text of one row, and this is its first step.
            inputs = self._model.prepare_inputs_for_generation(
                ids.long()[:, None],
                next_sequence_length=1,
                use_cache=True,
                hidden_states=((hidden[:, None],), None),
                trailing_text_hidden=text_step[:, None],
                generation_step=0,
            )
        return inputs["inputs_embeds"][:, 0], inputs["residual_codes"]
