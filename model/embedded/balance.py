"""Load balance without a loss term: the router's bias follows each expert's load error.

DeepSeek-V3's report, section 2.1.2 (auxiliary-loss-free load balancing): after each step the bias
of an overloaded expert falls by gamma, that of an underloaded one rises by gamma. The bias enters
the choice of experts only, not their weights.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn


def router_bias(router: nn.Module) -> Tensor:
    """A router's `e_score_correction_bias`, float32 [E]."""
    bias = router.e_score_correction_bias
    assert isinstance(bias, Tensor)
    return bias


def routers(model: nn.Module) -> dict[int, nn.Module]:
    """The MoE routers by layer number."""
    routers_by_layer: dict[int, nn.Module] = {}
    for name, module in model.named_modules():
        if name.endswith(".mlp.gate") and hasattr(module, "e_score_correction_bias"):
            routers_by_layer[int(name.split(".layers.")[1].split(".")[0])] = module
    return routers_by_layer


class LoadCounter:
    """Counts, by forward hooks, the tokens that each expert of each layer receives.

    Set `mask` (bool [T], T the tokens of the next forward) to leave padding out.
    """

    def __init__(self, model: nn.Module) -> None:
        self.routers = routers(model)
        self.mask: Tensor | None = None
        self.loads: dict[int, Tensor] = {}
        self._handles = []
        for layer, router in self.routers.items():
            bias = router_bias(router)
            self.loads[layer] = torch.zeros(bias.numel(), dtype=torch.float32, device=bias.device)
            self._handles.append(router.register_forward_hook(self._hook(layer)))

    def _hook(self, layer: int) -> Callable[[nn.Module, tuple, tuple], None]:
        def count(module: nn.Module, inputs: tuple, output: tuple) -> None:
            indices = output[2]  # [T, K]
            ones = torch.ones(indices.shape, dtype=torch.float32, device=indices.device)
            if self.mask is not None:
                ones = ones * self.mask.unsqueeze(1)
            self.loads[layer].scatter_add_(0, indices.flatten(), ones.flatten())

        return count

    def reset(self) -> None:
        """Forget all counts."""
        for load in self.loads.values():
            load.zero_()

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def update_biases(self, gamma: float) -> None:
        """Move every bias by gamma against its load error, then forget the counts."""
        for layer, router in self.routers.items():
            load = self.loads[layer]
            router_bias(router).add_(torch.sign(load.mean() - load), alpha=gamma)
        self.reset()
