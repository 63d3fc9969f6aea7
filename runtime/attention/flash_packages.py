"""The packages FlashAttention 2, 3 and 4, where they are installed.

Their functions with an lse are not public and change; `probe` finds out whether the installed version
still serves. Sources: flash_attn/flash_attn_interface.py, hopper/flash_attn_interface.py and
flash_attn/cute/interface.py of the FlashAttention repository.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

from .flash import DenseFlash

NO_WINDOW: dict[str, Any] = {"window_size_left": -1, "window_size_right": -1, "softcap": 0.0}


class _Package(DenseFlash):
    """One package: the module to import, and the oldest GPUs that it knows."""

    module: str
    capability = 8

    @property
    def installed(self) -> bool:
        """Whether its module can be found."""
        return _importable(self.module)

    def limit(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int
    ) -> str | None:
        """Say why this backend cannot serve, or None when it can."""
        if not self.installed:
            return f"the module {self.module} is not installed"
        major, minor = torch.cuda.get_device_capability(device)
        if major < self.capability:
            return f"it needs compute capability {self.capability}.0, found {major}.{minor}"
        return super().limit(device, dtype, head_dim, value_dim)

    def _import(self) -> Any:
        return importlib.import_module(self.module)


class FlashAttention2(_Package):
    """The package flash-attn 2."""

    name = "flash_attn_2"
    module = "flash_attn.flash_attn_interface"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return (out, lse)."""
        out, lse, *_ = self._import()._flash_attn_forward(
            q[None], k[None], v[None], dropout_p=0.0, softmax_scale=scale, causal=causal,
            alibi_slopes=None, return_softmax=False, **NO_WINDOW,
        )  # fmt: skip
        return out[0], lse[0].transpose(0, 1)

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *,
        mask: Tensor | None, causal: bool, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return (dq, dk, dv)."""
        dq, dk, dv = (torch.empty_like(x[None]) for x in (q, k, v))
        self._import()._flash_attn_backward(
            grad_out[None], q[None], k[None], v[None], out[None], _by_head(lse), dq, dk, dv,
            dropout_p=0.0, softmax_scale=scale, causal=causal, alibi_slopes=None,
            deterministic=torch.are_deterministic_algorithms_enabled(), **NO_WINDOW,
        )  # fmt: skip
        return dq[0], dk[0], dv[0]


class FlashAttention3(_Package):
    """FlashAttention 3, for Hopper."""

    name = "flash_attn_3"
    module = "flash_attn_interface"
    capability = 9

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return (out, lse)."""
        out, lse, *_ = self._import()._flash_attn_forward(
            q[None], k[None], v[None], softmax_scale=scale, causal=causal, **NO_WINDOW
        )
        return out[0], lse[0].transpose(0, 1)

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *,
        mask: Tensor | None, causal: bool, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return (dq, dk, dv)."""
        dq, dk, dv = (torch.empty_like(x[None]) for x in (q, k, v))
        self._import()._flash_attn_backward(
            grad_out[None], q[None], k[None], v[None], out[None], _by_head(lse), dq=dq, dk=dk, dv=dv,
            softmax_scale=scale, is_causal=causal,
            deterministic=torch.are_deterministic_algorithms_enabled(), **NO_WINDOW,
        )  # fmt: skip
        return dq[0], dk[0], dv[0]


class FlashAttention4(_Package):
    """FlashAttention 4, for Hopper and Blackwell."""

    name = "flash_attn_4"
    module = "flash_attn.cute.interface"
    capability = 9

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return (out, lse)."""
        out, lse, *_ = self._import()._flash_attn_fwd(
            q[None], k[None], v[None], softmax_scale=scale, causal=causal, return_lse=True
        )
        return out[0], lse[0].transpose(0, 1)

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *,
        mask: Tensor | None, causal: bool, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return (dq, dk, dv)."""
        dq, dk, dv, *_ = self._import()._flash_attn_bwd(
            q[None], k[None], v[None], out[None], grad_out[None], _by_head(lse), softmax_scale=scale,
            causal=causal, deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        return dq[0], dk[0], dv[0]


def _by_head(lse: Tensor) -> Tensor:
    """[rows, heads] -> [1, heads, rows]."""
    return lse.transpose(0, 1)[None].contiguous()


@functools.cache
def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # no parent package
        return False
