from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tidemill.train.logprobs import attention_mask, token_log_probs

POSITIONS, HIDDEN, VOCABULARY = 7, 16, 50


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Positions 0 and 3 predict several targets, position 5 none."""
    torch.manual_seed(0)
    hidden = torch.randn(POSITIONS, HIDDEN).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, requires_grad=True)
    predictor = torch.tensor([3, 0, 0, 1, 2, 3, 4, 6, 0])
    return hidden, weight, predictor, torch.randint(VOCABULARY, predictor.shape)


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_chunked_log_probs_equal_log_softmax_with_gradients(chunk: int, temperature: float) -> None:
    hidden, weight, predictor, target_ids = inputs()
    slope = torch.linspace(-1, 2, len(predictor))
    found, _ = token_log_probs(hidden, weight, predictor, target_ids, temperature=temperature, chunk=chunk)
    gradients = torch.autograd.grad((slope * found).sum(), (hidden, weight))
    logits = hidden @ weight.T / temperature
    expected = torch.log_softmax(logits, -1)[predictor, target_ids]
    wanted = torch.autograd.grad((slope * expected).sum(), (hidden, weight))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_entropy_equals_the_plain_one_with_gradients(chunk: int, temperature: float) -> None:
    hidden, weight, predictor, target_ids = inputs()
    slope, other = torch.linspace(-1, 2, len(predictor)), torch.linspace(1, -2, len(predictor))
    log_probs, entropy = token_log_probs(
        hidden, weight, predictor, target_ids, temperature=temperature, chunk=chunk, entropy_gradient=True
    )
    gradients = torch.autograd.grad((slope * log_probs + other * entropy).sum(), (hidden, weight))
    plain = torch.log_softmax(hidden @ weight.T / temperature, -1)
    expected = -(plain.exp() * plain).sum(-1)[predictor]
    chosen = plain[predictor, target_ids]
    wanted = torch.autograd.grad((slope * chosen + other * expected).sum(), (hidden, weight))
    torch.testing.assert_close(entropy, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients, wanted, rtol=1e-4, atol=2e-5)


def test_an_entropy_that_is_only_a_metric_has_no_gradient() -> None:
    _, entropy = token_log_probs(*inputs(), temperature=1.0, chunk=3)
    assert not entropy.requires_grad


def test_a_very_unlikely_token_keeps_its_log_prob() -> None:
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [200.0]])
    found, _ = token_log_probs(hidden, weight, torch.tensor([0]), torch.tensor([0]), temperature=1.0, chunk=1)
    assert found.item() == pytest.approx(-200.0)


@pytest.mark.parametrize("chunk", [3, 7])
def test_bfloat16_products_give_float32_log_probs(chunk: int) -> None:
    hidden, weight, predictor, target_ids = inputs(torch.bfloat16)
    found, _ = token_log_probs(hidden, weight, predictor, target_ids, temperature=0.6, chunk=chunk)
    found.sum().backward()
    expected = torch.log_softmax(hidden.float() @ weight.T / 0.6, -1)[predictor, target_ids]
    assert (found.dtype, weight.grad.dtype, hidden.grad.dtype) == (torch.float32, torch.float32, torch.bfloat16)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.3)


def test_the_mask_shows_only_the_own_path() -> None:
    # The example of tidemill.train.packing, with one column of padding.
    mask = attention_mask(torch.tensor([[5, 5, 5, 4, 5, 6]]))
    assert mask.shape == (1, 1, 6, 6)
    seen = [[j for j in range(6) if mask[0, 0, i, j]] for i in range(6)]
    assert seen == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 4], [5]]
