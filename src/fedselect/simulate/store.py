"""Where clients' states rest between rounds: one stack of rows, by client id."""

import torch
from torch import Tensor

from fedselect.tree import State, Tree


class Store:
    """States of all clients, stacked; a cohort that is everybody in order is handed over without a copy."""

    def __init__(self, clients: int, device: torch.device) -> None:
        self.clients = clients
        self.device = device
        self.rows: State = {}
        self.joined = torch.zeros(clients, dtype=torch.bool)

    def take(self, ids: Tensor, device: torch.device) -> State:
        if self._everybody(ids):
            return {k: {n: v.to(device) for n, v in t.items()} for k, t in self.rows.items()}
        at = ids.to(self.device)
        return {k: {n: v[at].to(device) for n, v in t.items()} for k, t in self.rows.items()}

    def put(self, ids: Tensor, state: State) -> None:
        self.joined[ids.cpu()] = True
        if self._everybody(ids):
            self.rows = {k: {n: v.to(self.device) for n, v in t.items()} for k, t in state.items()}
            return
        at = ids.to(self.device)
        for k, tree in state.items():
            for n, v in tree.items():
                self._room(k, n, v)[at] = v.to(self.device)

    def to(self, device: torch.device) -> None:
        """Let the rows rest elsewhere."""
        self.device = device
        self.rows = {k: {n: v.to(device) for n, v in t.items()} for k, t in self.rows.items()}

    def _room(self, key: str, name: str, like: Tensor) -> Tensor:
        tree: Tree = self.rows.setdefault(key, {})
        if name not in tree:
            tree[name] = torch.zeros(self.clients, *like.shape[1:], dtype=like.dtype, device=self.device)
        return tree[name]

    def _everybody(self, ids: Tensor) -> bool:
        return len(ids) == self.clients and bool((ids.cpu() == torch.arange(self.clients)).all())
