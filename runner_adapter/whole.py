"""A sender that puts one payload a request: what its steps hand over, merged until the request ends."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from connector import ConnectorError
from runner_adapter.arguments import check_kind
from runner_adapter.merge import MergeRules, merged
from runner_adapter.values import Growing


class Whole:
    """By rid and name, host tensors of their own memory: `rules` say which names grow by the rows of each step, and
    all others are as the last step had them."""

    def __init__(self, rules: MergeRules) -> None:
        check_kind("whole", rules, MergeRules)
        self._rules = rules
        self._held: dict[str, dict[str, torch.Tensor]] = {}
        self._blocks: dict[str, dict[str, Growing]] = {}

    def __contains__(self, rid: object) -> bool:
        return rid in self._held

    def add(self, rid: str, named: Mapping[str, torch.Tensor]) -> None:
        """A step's part. Raises as `merge.merged` does, with the rid; then nothing has changed."""
        blocks = self._blocks.setdefault(rid, {})
        try:
            self._held[rid] = merged(self._held.get(rid, {}), [named], self._rules, "cpu", blocks)
        except ConnectorError as error:
            raise error.anew(rid=rid) from None

    def take(self, rid: str) -> dict[str, torch.Tensor]:
        """All of the request; nothing of it stays. {} if there is nothing."""
        self._blocks.pop(rid, None)
        return self._held.pop(rid, {})
