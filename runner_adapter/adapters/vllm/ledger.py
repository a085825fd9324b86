"""What is known of each live request, from the engine's scheduler: no tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

#: Where a request's extra sampling arguments hold the seed of its talker (vLLM-Omni; the runner).
SEEDS = ("tts_local_seed", "qwen3_tts_request_seed")


@dataclass(slots=True)
class Known:
    """A live request. `params`: the engine's SamplingParams, or None."""

    prompt_len: int
    params: Any
    #: Output tokens that were accepted.
    generated: int = 0
    #: Tokens drafted for it in the last step.
    drafted: int = 0
    #: The engine has taken its place in the batch away.
    preempted: bool = False
    #: How many of its tokens' rows were handed over.
    handed: int = 0

    @property
    def extra_args(self) -> Mapping[str, Any]:
        return getattr(self.params, "extra_args", None) or {}

    @property
    def seed(self) -> Any:
        """Its talker's, or None."""
        return next((self.extra_args[name] for name in SEEDS if self.extra_args.get(name) is not None), None)

    def is_reading(self, computed: int) -> bool:
        """Whether a step after so many `computed` tokens reads: its prompt, or after preemption its tokens again, up
        to the last one, which goes in as a token that was just sampled."""
        return computed < self.prompt_len + max(0, self.generated - 1)

    def hand(self, computed: int, tokens: int) -> int:
        """Note that the rows of so many tokens are handed over; how many of them were before."""
        again = min(tokens, max(0, self.handed - computed))
        self.handed = max(self.handed, computed + tokens)
        return again

    def told(self, computed: int) -> dict[str, Any]:
        """What vLLM-Omni's runner tells the hook of a request."""
        return {
            "_omni_prompt_len": self.prompt_len,
            "_omni_num_computed_tokens": computed,
            "_omni_is_prefill": computed < self.prompt_len,
            "_omni_max_tokens": getattr(self.params, "max_tokens", None),
            "_omni_seed": getattr(self.params, "seed", None),
            "duplex_token_offset": computed,
            "duplex_prompt_len": self.prompt_len,
        }


class Ledger(dict[str, Known]):
    """Live requests by rid. `drafts_late`: the engine schedules a step before it knows which drafted tokens of the last
    one were accepted."""

    def __init__(self, *, drafts_late: bool) -> None:
        super().__init__()
        self._drafts_late = drafts_late

    def leave(self, finished: Iterable[str], preempted: Iterable[str]) -> None:
        for rid in finished:
            self.pop(rid, None)
        for rid in preempted:
            if rid in self:
                self[rid].preempted = True

    def resume(self, rid: str, request: Any) -> bool:
        """Whether a request that the scheduler calls new is one that it had preempted (V2), and goes on. If its prompt
        has grown meanwhile it is a further segment of its input."""
        known = self.get(rid)
        if known is None or not known.preempted or request.prompt_len != known.prompt_len:
            return False
        known.preempted = False
        if request.prefill_token_ids is not None:
            known.generated = len(request.prefill_token_ids) - known.prompt_len
        return True

    def enter(self, rid: str, request: Any) -> None:
        """A new request, or a further segment: what was generated is prompt now."""
        known = self.get(rid)
        handed = 0 if known is None else known.handed
        self[rid] = Known(request.prompt_len, request.sampling_params, handed=handed)

    def count(self, generated: Mapping[str, int], drafted: Mapping[str, int]) -> None:
        """Output tokens, as a step's scheduler counts them: those that are sampled, of which it may not have heard yet,
        and under late drafts also the drafted ones of the last step, which are not accepted yet. `drafted`: how many
        in this step."""
        for rid, count in generated.items():
            known = self[rid]
            known.preempted = False
            known.generated = max(0, count - (known.drafted if self._drafts_late else 0))
        for rid, known in self.items():
            known.drafted = drafted.get(rid, 0)
