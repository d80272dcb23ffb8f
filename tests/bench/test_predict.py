"""Predictors of the next layer's experts, on choices that are known."""

from __future__ import annotations

import torch

from bench.cache.predict import chosen_of, precision, trained


def test_a_predictor_learns_what_a_matrix_chooses() -> None:
    torch.manual_seed(0)
    hidden, matrix = torch.randn(600, 24), torch.randn(24, 8)
    chosen = chosen_of((hidden @ matrix).topk(2, -1).indices, 8)
    scores = trained(hidden[:500], chosen[:500])(hidden[500:])
    assert precision(scores, chosen[500:], 1) > 0.9
    often = chosen[:500].float().mean(0).expand(100, 8)
    assert precision(often, chosen[500:], 1) < 0.5


def test_precision_counts_what_is_chosen() -> None:
    chosen = chosen_of(torch.tensor([[0, 1], [2, 3]]), 4)
    scores = torch.tensor([[9.0, 1.0, 8.0, 0.0], [0.0, 1.0, 3.0, 2.0]])
    assert precision(scores, chosen, 1) == 1 and precision(scores, chosen, 2) == 0.75
