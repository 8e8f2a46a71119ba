"""A card that is none: its tensors compute on the CPU and say that they lie on a GPU.

Where there is no GPU nothing shows that tensors of the host and of the card are added up, which
fails there, that a step which is to be recorded waits for the host, or that a recording uses
what has since been replaced. Under `pretended_card`, tensors that are made on "cuda" or sent
there refuse the first two; recordings are made and replayed, operation by operation. Numbers are
real, compiling is left out, and nothing is as fast.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

from cclis.engine import devices as engine_device
from cclis.engine import recording
from cclis.nn import compiling, network

CARD, HOST = torch.device("cuda", 0), torch.device("cpu")
aten = torch.ops.aten
BETWEEN = (aten.copy_, aten._to_copy)
"""They bring tensors from the host to the card and back."""
INDEXING = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)
"""They take indices from the host as well, and send them to the card."""
JOINING = (aten.cat, aten.stack)
"""They do not even take a single number from the host."""
WAITING = (
    aten._linalg_check_errors,
    aten._local_scalar_dense,
    aten._unique2,
    aten.allclose,
    aten.bincount,
    aten.equal,
    aten.masked_select,
    aten.nonzero,
    aten.repeat_interleave,
    aten.unique_consecutive,
    aten.unique_dim,
)
"""The host waits for what they find, or for how much that is. There are more."""
WHOLE = {nn.functional.one_hot: aten.one_hot.default, Tensor.quantile: aten.quantile.default}
"""They make tensors where torch, below Python, takes their input to be: on the host."""
NORMS = (aten.native_batch_norm,)
"""They change running statistics, which their schema does not say."""

WAITS: list[str] = []
"""What the host has waited for."""


class CardError(AssertionError):
    """What a GPU would not do, or not while it is recorded."""


class CardTensor(Tensor):
    """A tensor that says it lies on the card."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> CardTensor:
        made: CardTensor = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
        )
        made.held = held
        return made

    device = property(lambda self: CARD)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and device.type == "cpu":
            return self.cpu().to(dtype or self.dtype)
        return super().to(dtype or self.dtype, memory_format=layout or torch.preserve_format)

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
        wait("a copy to the host")
        return self.detach().held.clone()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, **kwargs: Any) -> Any:
        raise CardError("numpy cannot read what lies on a card")

    def record_stream(self, stream: Any) -> None:
        """There is but one."""

    def __repr__(self, **kwargs: Any) -> str:
        return f"on the card: {self.held}"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return compute(func, args, kwargs or {})


class CardMode(TorchDispatchMode):
    """Makes tensors on the card where they are asked for."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return compute(func, args, kwargs or {})


class PlacesMode(TorchFunctionMode):
    """Sees what operations cannot: the device a tensor is to follow, and a generator's."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in WHOLE and isinstance(args[0], CardTensor):
            if func is nn.functional.one_hot and len(args) < 2 and not kwargs:
                wait("the largest class of one_hot")
            return compute(WHOLE[func], args, kwargs or {})
        if func is Tensor.to and len(args) > 1:
            what, where = args[:2]
            if isinstance(where, CardTensor):
                args = (what, CARD, where.dtype)
            elif where in ("cuda", torch.device("cuda")):
                args = (what, CARD, *args[2:])
        if func is Tensor.new_tensor and isinstance(args[0], CardTensor):
            like = {"dtype": args[0].dtype, "device": CARD}
            return torch.tensor(*args[1:], **{**like, **(kwargs or {})})
        found = func(*args, **(kwargs or {}))
        source = (kwargs or {}).get("generator")
        if isinstance(source, CardGenerator) and source.device.type != found.device.type:
            raise CardError(f"{func} on {found.device} by a generator on {source.device}")
        return found


class CardGenerator(torch.Generator):
    """A generator that says where it is."""

    place: torch.device

    def __new__(cls, device: torch.device | str = "cpu") -> CardGenerator:
        made: CardGenerator = super().__new__(cls, "cpu")
        made.place = torch.device(device)
        return made

    device = property(lambda self: self.place)


class CardFabric:
    """What the engine asks of a Fabric."""

    device = CARD

    def __init__(self, *, devices: int, precision: str):
        self._short = precision == "bf16-mixed"

    def autocast(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16, enabled=self._short)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def to_device(self, module: nn.Module) -> nn.Module:
        return module.to(CARD)


class CardStream:
    """The only one."""

    def __init__(self, device: Any = None):
        pass

    def wait_stream(self, other: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self) -> None:
        pass


class CardGraph:
    """What was done on the card while it was captured, to be done again in the same places."""

    capturing: CardGraph | None = None

    def __init__(self) -> None:
        self._calls: list[tuple[Any, Any, list[Tensor | None]]] = []
        self._before: list[tuple[Tensor, Tensor]] = []

    def run(self, func: Any, given: Any) -> Any:
        """Call on what the card holds, and note it."""
        self._before += [(value, value.clone()) for value in changed(func, *given)]
        found = func(*given[0], **given[1])
        there = {_storage(value) for value in tensors(given)}
        places = [None if _storage(value) in there else value for value in tensors(found)]
        if func._schema.is_mutable or places.count(None) < len(places):
            self._calls.append((func, given, places))
        return found

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Note what is done, and undo it: a capture computes nothing."""
        CardGraph.capturing = self
        try:
            yield
        finally:
            CardGraph.capturing = None
            for value, before in reversed(self._before):
                value.copy_(before)
            self._before = []

    def replay(self) -> None:
        """Do it all again."""
        for func, (args, kwargs), places in self._calls:
            for place, value in zip(places, tensors(func(*args, **kwargs)), strict=True):
                if place is not None:
                    place.copy_(value)


def mapped(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Lists, tuples and dictionaries with their tensors changed.

    In torch's own way, which knows more kinds, tests spend half of their time.
    """
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, list | tuple):
        return type(tree)([mapped(change, value) for value in tree])
    if isinstance(tree, dict):
        return {name: mapped(change, value) for name, value in tree.items()}
    return tree


def tensors(tree: Any) -> list[Tensor]:
    """Those in lists, tuples and dictionaries."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, list | tuple):
        return []
    return [value for part in tree for value in tensors(part)]


def changed(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """Those that an operation writes to."""
    if func.overloadpacket in NORMS:
        return tensors(args[3:5])
    names = [a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
    by_name = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    return tensors([by_name.get(name) for name in names])


def _storage(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


def refuse_recorded(what: str) -> None:
    """Raise if the card is being recorded."""
    if CardGraph.capturing is not None:
        raise CardError(f"in a recording: {what}")


def wait(what: str) -> None:
    """The host waits for the card, which a recording cannot."""
    refuse_recorded(what)
    WAITS.append(what)


def refuse_mixed(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Raise if an operation of tensors on the card also takes some of the host that it may not."""
    kind, written = func.overloadpacket, {id(value) for value in changed(func, args, kwargs)}
    # A single number of the host is sent along, unless it is to be joined or written to.
    of_host = [
        value
        for value in tensors((args, kwargs))
        if not isinstance(value, CardTensor)
        and (value.dim() or kind in JOINING or id(value) in written)
    ]
    if not of_host:
        return
    indices = {id(value) for value in tensors(args[1])} if kind in INDEXING else set()
    if not isinstance(args[0], CardTensor) or any(id(value) not in indices for value in of_host):
        raise CardError(f"{func} of tensors on the card and on the host")
    refuse_recorded(f"{func} by indices of the host")


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What an operation gives: on the card if what it takes, or what it is asked for, is there."""
    kind, place, taken = func.overloadpacket, kwargs.get("device"), tensors((args, kwargs))
    on_card = [value for value in taken if isinstance(value, CardTensor)]
    asked = place is not None and place.type == "cuda"
    if kind in BETWEEN:
        # Below Python a tensor on the card is taken to be on the host, and asked to stay there.
        there = asked or isinstance(args[0], CardTensor)
        if on_card and not there:
            wait(f"{func} from the card to the host")
        elif there and len(on_card) < len(taken):
            refuse_recorded(f"{func} from the host to the card")
    else:
        there = asked or bool(on_card)
        if on_card and len(on_card) < len(taken):
            refuse_mixed(func, args, kwargs)
    if there and kind in WAITING:
        wait(f"{func}, for which the host waits")
    if there and kind in INDEXING and any(v.dtype == torch.bool for v in tensors(args[1])):
        wait(f"{func} by a mask, for whose size the host waits")
    graph = CardGraph.capturing if there else None

    def bare(value: Tensor) -> Tensor:
        # A recording reads what lies on the host once.
        return value.held if isinstance(value, CardTensor) else value.clone() if graph else value

    given = mapped(bare, (args, dict(kwargs)))
    if asked:
        given[1]["device"] = HOST
    found = graph.run(func, given) if graph else func(*given[0], **given[1])
    if not there:
        return found
    return return_and_correct_aliasing(func, args, kwargs, mapped(CardTensor, found))


@contextmanager
def pretended_card() -> Iterator[None]:
    """For a while this machine has a card, as far as cclis can see."""
    grouped = torch.optim.Optimizer._group_tensors_by_device_and_dtype
    autocast, precision = torch.autocast, torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled()
    lifted = torch._C._only_lift_cpu_tensors()

    def by_place(*args: Any, **kwargs: Any) -> Any:
        groups = grouped(*args, **kwargs).items()
        return {(found[0][0][0].device, dtype): found for (_, dtype), found in groups}

    def fabric(*, accelerator: str, **kwargs: Any) -> Any:
        on_cpu = accelerator == "cpu"
        return Fabric(accelerator=accelerator, **kwargs) if on_cpu else CardFabric(**kwargs)

    def forget() -> None:
        for cached in (compiling.compiled_for_all, network._encode_compiled):
            cached.cache_clear()
        recording._side_stream.cache_clear()

    stand_ins: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "get_device_name": lambda device=None: "no card",
        "mem_get_info": lambda device=None: (2**40, 2**40),
        "max_memory_allocated": lambda device=None: 0,
        "memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "empty_cache": lambda: None,
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "device": lambda device: nullcontext(),
        "Stream": CardStream,
        "current_stream": CardStream,
        "stream": lambda stream: nullcontext(),
        "CUDAGraph": CardGraph,
        "graph": CardGraph.capture,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name in ("benchmark", "deterministic", "allow_tf32"):
            patch.setattr(torch.backends.cudnn, name, getattr(torch.backends.cudnn, name))
        workspace = "CUBLAS_WORKSPACE_CONFIG"
        patch.setenv(workspace, os.environ.get(workspace, ":4096:8"))
        for name, value in stand_ins.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch, "Generator", CardGenerator)
        patch.setattr(torch, "compile", lambda function, **_: function)
        patch.setattr(torch, "autocast", lambda _, *args, **kw: autocast("cpu", *args, **kw))
        patch.setattr(Tensor, "pin_memory", lambda value: value)
        patch.setattr(torch.optim.Optimizer, "_group_tensors_by_device_and_dtype", by_place)
        patch.setattr(engine_device, "Fabric", fabric)
        before = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        # Then torch.tensor makes one on the host and sends it, which operations see.
        torch._C._set_only_lift_cpu_tensors(True)
        forget()
        try:
            with PlacesMode(), CardMode():
                yield
        finally:
            forget()
            torch._C._set_only_lift_cpu_tensors(lifted)
            torch.__future__.set_overwrite_module_params_on_conversion(before)
            torch.set_float32_matmul_precision(precision)
            torch.use_deterministic_algorithms(deterministic)
