"""Everything of a training process that a check must leave as it was, as one flat dict that can be compared."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.distributed.models import Job

HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called", "_state_dict_hooks",
)  # fmt: skip
_REGISTRIES = ("_parameters", "_buffers", "_modules")


def live_state(job: Job) -> dict[str, Any]:
    """Values, identities and addresses. Tensors are copied, so a later change in place shows."""
    found: dict[str, Any] = {}
    _modules(found, job)
    _optimizer(found, job.optimizer)
    found["rng.torch"] = torch.get_rng_state()
    found["rng.numpy"] = _frozen(np.random.get_state())
    found["rng.python"] = random.getstate()
    found["flags"] = flags()
    if job.scaler is not None:
        found["scaler"] = _frozen(job.scaler.state_dict())
    return found


def flags() -> dict[str, Any]:
    """Process-wide switches that a replay sets, or might."""
    return {
        "autocast": (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        ),
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        ),
        "cudnn": (
            torch.backends.cudnn.enabled,
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.allow_tf32,
        ),
        "matmul": torch.get_float32_matmul_precision(),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "stance": str(torch._dynamo.eval_frame._stance),
        "warnings": list(warnings.filters),
    }


def hooks(model: nn.Module) -> dict[str, Any]:
    """The hooks registered on every module and every parameter, by identity of the hook."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        for kind in HOOKS:
            # bound methods are made anew at every access, so the function and its object stand for them
            found[f"{name}.{kind}"] = [_hook(hook) for hook in module.__dict__.get(kind, {}).values()]
    for name, parameter in model.named_parameters():
        found[f"{name}.hooks"] = [_hook(hook) for hook in (parameter._backward_hooks or {}).values()]
    return found


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Keys whose values differ, bit for bit."""
    keys = sorted(before.keys() | after.keys())
    return [key for key in keys if key not in before or key not in after or not same(before[key], after[key])]


def same(a: Any, b: Any) -> bool:
    """Bitwise equality of nested values; NaNs of equal bits are equal."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return torch.equal(_bytes(a), _bytes(b))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(type(a) is type(b) and a == b)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _modules(found: dict[str, Any], job: Job) -> None:
    for name, module in job.wrapped.named_modules(remove_duplicate=True):
        found[f"{name}.training"] = module.training
        for registry in _REGISTRIES:
            entries = getattr(module, registry)
            found[f"{name}.{registry}"] = [(key, id(value)) for key, value in entries.items()]
        for key, value in vars(module).items():
            if key in HOOKS or key in _REGISTRIES or isinstance(value, nn.Module):
                continue
            if _is_plain(value):
                found[f"{name}.{key}"] = (id(value) if isinstance(value, torch.Tensor) else None, _frozen(value))
    for name, parameter in job.wrapped.named_parameters():
        found[f"{name}.value"] = _tensor(parameter)
        found[f"{name}.grad"] = None if parameter.grad is None else _tensor(parameter.grad)
    for name, buffer in job.wrapped.named_buffers():
        found[f"{name}.value"] = _tensor(buffer)


def _optimizer(found: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    for index, group in enumerate(optimizer.param_groups):
        found[f"group{index}"] = _frozen({key: value for key, value in group.items() if key != "params"})
        found[f"group{index}.params"] = [id(parameter) for parameter in group["params"]]
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    found["optimizer.states"] = len(optimizer.state)
    for index, parameter in enumerate(order):
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"state{index}.{key}"] = _tensor(value) if isinstance(value, torch.Tensor) else _frozen(value)
    skip = ("state", "param_groups", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    for key, value in vars(optimizer).items():
        if key not in skip and _is_plain(value):
            found[f"optimizer.{key}"] = _frozen(value)


def _tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    return id(tensor), tensor.data_ptr() if not tensor.is_sparse else 0, tensor.requires_grad, _frozen(tensor)


def _is_plain(value: Any) -> bool:
    plain = (int, float, str, list, dict, tuple, torch.Tensor, torch.Generator, np.random.Generator)
    return isinstance(value, plain) and not (isinstance(value, (list, tuple)) and _holds_objects(value))


def _holds_objects(value: Any) -> bool:
    return any(not isinstance(item, (int, float, str, torch.Tensor)) for item in value)


def _frozen(value: Any) -> Any:
    """A copy that later changes in place cannot reach; objects of unknown types by identity."""
    if isinstance(value, torch.Tensor):
        return value.detach().to_dense().clone() if value.is_sparse else value.detach().clone()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return _frozen(value.bit_generator.state)
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {str(key): _frozen(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_frozen(item) for item in value]
    if value is None or isinstance(value, (int, float, str, bool)):
        return value
    return id(value)


def _hook(hook: Any) -> tuple[int, int]:
    return id(getattr(hook, "__func__", hook)), id(getattr(hook, "__self__", None))
