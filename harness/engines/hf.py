"""The model that a package was exported from, as transformers runs it: on the CPU, with eager attention.

To a caller it is a decoder without a cache: token IDs of a whole sequence go in, the logits at every position
come out. So one call along given tokens says what the source thinks of each of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata, util
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from harness.engines.base import (
    Availability,
    Engine,
    EngineOption,
    OptionValue,
    SessionInfo,
    TensorHandle,
)
from harness.engines.hf_folder import check_model_folder
from harness.engines.host import HostSession
from harness.engines.options import Choice, Count, complete
from harness.engines.wording import first_line
from harness.errors import EngineFailedError, EngineUnavailableError, InputError
from harness.ports import Port, PortInventory

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["ENGINE", "LOGITS", "TOKENS", "HfEngine", "HfHandle", "HfSession"]

TOKENS, LOGITS = "input_ids", "logits"
"""The two ports of every source model."""

_NEEDED = ("transformers", "torch")
_INSTALL = "Run `pip install 'onnx-parity[hf]'`."
_MOST_NAMES = 3
_ITS_OWN = "Use the config.json that belongs to the weights."
_MASKS = frozenset({"masked_bias"})
"""Constants of attention that older files have among the weights."""


class HfHandle:
    """A `torch.Tensor` on the CPU."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    @property
    def shape(self) -> tuple[int, ...]:
        """Concrete extents."""
        return tuple(self.value.shape)

    @property
    def dtype(self) -> str:
        """Element type in the vocabulary of `harness.ports.Port.dtype`."""
        return str(self.value.dtype).removeprefix("torch.")


class HfSession(HostSession[Any]):
    """A `harness.engines.base.Session` around a model of transformers. No logits are copied."""

    def __init__(self, model: Any, *, info: SessionInfo, vocabulary: int) -> None:
        dtype = str(info.settings["precision"])
        ports = PortInventory(
            inputs=(Port(TOKENS, "int64", ("batch", "sequence")),),
            outputs=(Port(LOGITS, dtype, ("batch", "sequence", vocabulary)),),
        )
        super().__init__(model, info=info, inventory=ports)

    def place(self, array: NDArray[Any]) -> HfHandle:
        """A copy of a host array: token IDs are few, and torch takes no memory that it may not write to."""
        import torch

        return HfHandle(torch.tensor(array))

    def run(self, feeds: Mapping[str, TensorHandle], outputs: Sequence[str]) -> dict[str, TensorHandle]:
        """Run the model over a whole sequence; see `harness.engines.base.Session.run`."""
        import torch

        model = self._live()
        ids = cast("HfHandle", feeds[TOKENS]).value
        try:
            with torch.inference_mode():
                logits = model(input_ids=ids, use_cache=False).logits
        except (RuntimeError, ValueError, IndexError, NotImplementedError) as error:
            raise EngineFailedError(
                f"{self._info.engine} failed while running: {first_line(error)}",
                kind="crashed",
                next_action="Run the model with transformers alone to see whether it works there.",
            ) from error
        return {name: HfHandle({LOGITS: logits}[name]) for name in outputs}

    def _view(self, handle: TensorHandle) -> NDArray[Any]:
        view: NDArray[Any] = cast("HfHandle", handle).value.numpy()
        return view


@dataclass(frozen=True, slots=True)
class HfEngine:
    """Models of transformers on the CPU. It runs no ONNX graph, and so is no candidate: it is a source."""

    name: str = "hf"
    description: str = "transformers on the CPU, eager: the source model of an export (--source)"
    options: Mapping[str, EngineOption] = field(
        default_factory=lambda: MappingProxyType(
            {
                "precision": Choice("what weights and activations are kept in", ("float32", "float64")),
                "threads": Count("threads of torch; 0: as torch chooses", default=0),
            }
        )
    )

    def availability(self) -> Availability:
        """Whether both packages are installed; neither is imported, as that takes seconds."""
        missing = [name for name in _NEEDED if util.find_spec(name) is None]
        if missing:
            what = f"the package {missing[0]} is" if len(missing) == 1 else "transformers and torch are"
            return Availability(usable=False, reason=f"{what} not installed.", next_action=_INSTALL)
        return Availability(usable=True, version=_versions())

    def open(self, model: Path, options: Mapping[str, OptionValue]) -> HfSession:
        """Load the model in the folder `model`, all its weights widened to the precision.

        Raises:
            EngineUnavailableError: transformers or torch is missing, or does not load.
            EngineFailedError: transformers could not load a model that has all its files.
            InputError: an option has a value that it cannot take; the folder is none of a model (see
                `check_model_folder`); a weight is missing or has another shape, where transformers would go
                on with random numbers; or the model leaves out weights of what it has, so that they are those
                of another one.
        """
        values = complete(self.name, self.options, options)
        if model.is_file():
            raise InputError(
                f"{self.name} runs the model that a package was exported from, and {model} is a file.",
                next_action="Name an engine that runs graphs, and the source model with --source.",
            )
        found = self.availability()
        if not found.usable:
            raise EngineUnavailableError(
                f"{self.name} is not usable here: {found.reason}", next_action=found.next_action or _INSTALL
            )
        check_model_folder(model)
        try:
            import torch
            import transformers
        except Exception as error:  # a broken native library raises whatever it likes
            raise EngineUnavailableError(
                f"{self.name} is not usable here: {first_line(error)}", next_action=_INSTALL
            ) from error
        if threads := int(values["threads"]):
            torch.set_num_threads(threads)
        precision = str(values["precision"])
        loaded, unused = _load(transformers, model, getattr(torch, precision))
        info = SessionInfo(
            engine=self.name,
            version=_versions(),
            settings={
                "precision": precision,
                "threads": torch.get_num_threads(),
                "attention": "eager",
                "unused_weights": unused,
            },
            mode="eager",
        )
        return HfSession(loaded, info=info, vocabulary=_vocabulary(loaded))


def _load(transformers: Any, folder: Path, dtype: Any) -> tuple[Any, int]:
    """The model with exactly the weights of its files, and how many of those are of what it does not have."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation="eager",
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except Exception as error:  # transformers raises whatever its parts do
        raise EngineFailedError(
            f"transformers cannot load {folder}: {first_line(error)}",
            kind="unsupported",
            next_action="Check that `AutoModelForCausalLM.from_pretrained` loads it in this environment.",
        ) from error
    missing = sorted(found["missing_keys"])
    if missing:
        raise InputError(
            f"{folder}: the files of the weights lack {_some(missing)}: transformers would go on with random "
            "numbers there.",
            next_action="Copy or download every file of the model, or correct its config.json.",
        )
    other = sorted(str(key[0] if isinstance(key, tuple) else key) for key in found["mismatched_keys"])
    if other:
        raise InputError(
            f"{folder}: the weights {_some(other)} have another shape than config.json says.",
            next_action=_ITS_OWN,
        )
    unused, modules = sorted(found["unexpected_keys"]), dict(model.named_modules())
    left = [name for name in unused if _is_of(name, modules)]
    if left:
        raise InputError(
            f"{folder}: a model of the type {model.config.model_type}, as config.json has it, takes nothing "
            f"of the weights {_some(left)}: they are those of another model.",
            next_action=_ITS_OWN,
        )
    if hasattr(model, "set_experts_implementation"):
        # As plain as the attention: fused products of experts take no float64.
        model.set_experts_implementation("eager")
    return model.eval(), len(unused)


def _is_of(weight: str, modules: Mapping[str, Any]) -> bool:
    """Whether a weight belongs to what a model has: to one of its layers, or to more of them than it has.

    What lies elsewhere is of a part that was left out, such as what sees images.
    """
    parts = weight.split(".")
    if parts[-1] in _MASKS:
        return False
    module = modules.get(".".join(parts[:-1]))
    if module is not None and not any(module.children()):
        return True
    return any(part.isdigit() and ".".join(parts[:i]) in modules for i, part in enumerate(parts) if i)


def _vocabulary(model: Any) -> int:
    """Width of the logits."""
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    return int(model.config.get_text_config().vocab_size if weight is None else weight.shape[0])


def _some(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _versions() -> str:
    return ", ".join(f"{name} {metadata.version(name)}" for name in _NEEDED).removeprefix("transformers ")


ENGINE: Engine = HfEngine()
