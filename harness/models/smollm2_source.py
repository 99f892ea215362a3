"""What is in the GGUF of SmolLM2: hyperparameters, tokenizer tables, and weights by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import InputError
from harness.models.tokenizer import TokenizerTables

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["LlamaShape", "Smollm2Source", "read_smollm2"]


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Hyperparameters of a decoder of the llama family, as the GGUF gives them.

    Attributes:
        layers: decoder layers.
        hidden: width of the residual stream.
        heads: query heads.
        kv_heads: key and value heads; `heads` is a multiple of it.
        head_width: width of one head, all of it rotated.
        vocab: number of token IDs.
        context: the longest sequence it was trained for.
        rope_base: base of the rotary frequencies.
        norm_epsilon: epsilon of every RMSNorm.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_width: int
    vocab: int
    context: int
    rope_base: float
    norm_epsilon: float


@dataclass(frozen=True, slots=True)
class Smollm2Source:
    """An opened GGUF. Tensors stay in the memory-mapped file until `weight` asks for one.

    Attributes:
        name: the model's name in the file.
        licence: as the file states it.
        shape: hyperparameters.
        tokenizer: tables of the tokenizer.
        tensors: every tensor by its name in the file, as the reader of the library `gguf` gives it.
    """

    name: str
    licence: str
    shape: LlamaShape
    tokenizer: TokenizerTables
    tensors: Mapping[str, Any] = field(repr=False)

    def weight(self, name: str) -> NDArray[np.float32]:
        """The weights of tensor `name` in fp32: [out, in] for a projection, [width] for a norm."""
        import numpy as np
        from gguf.quants import dequantize

        tensor = self.tensors[name]
        return np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)

    def rotary_rows_as_halves(self, name: str, *, heads: int) -> NDArray[np.float32]:
        """The query or key projection `name`, [out, in], for rotary embedding in half form.

        The file has the rows for the interleaved form: within a head, rows 2i and 2i + 1 are rotated
        together. Here they become rows i and i + D/2, which gives the same attention scores.
        """
        weight = self.weight(name)
        rows, columns = weight.shape
        pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
        return pairs.swapaxes(1, 2).reshape(rows, columns)

    def storage(self) -> dict[str, int]:
        """How the file stores its tensors: number of tensors by GGUF type, in order of type."""
        return dict(sorted(Counter(tensor.tensor_type.name for tensor in self.tensors.values()).items()))


def read_smollm2(path: Path) -> Smollm2Source:
    """Open the GGUF at `path`, which is the pinned one: its hash has been checked.

    Raises:
        InputError: the library `gguf` is not installed.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise InputError(
            "Reading the weights of SmolLM2 needs the library `gguf`, which is not installed.",
            next_action="Run `pip install 'onnx-parity[smollm2]'`.",
        ) from error
    reader = GGUFReader(path)

    def value(key: str) -> Any:
        return reader.fields[key].contents()

    shape = LlamaShape(
        layers=value("llama.block_count"),
        hidden=value("llama.embedding_length"),
        heads=value("llama.attention.head_count"),
        kv_heads=value("llama.attention.head_count_kv"),
        head_width=value("llama.rope.dimension_count"),
        vocab=value("llama.vocab_size"),
        context=value("llama.context_length"),
        rope_base=value("llama.rope.freq_base"),
        norm_epsilon=value("llama.attention.layer_norm_rms_epsilon"),
    )
    tokenizer = TokenizerTables(
        pre_tokenizer=value("tokenizer.ggml.pre"),
        tokens=tuple(value("tokenizer.ggml.tokens")),
        token_types=tuple(value("tokenizer.ggml.token_type")),
        merges=tuple(value("tokenizer.ggml.merges")),
        bos_id=value("tokenizer.ggml.bos_token_id"),
        eos_id=value("tokenizer.ggml.eos_token_id"),
        unknown_id=value("tokenizer.ggml.unknown_token_id"),
        padding_id=value("tokenizer.ggml.padding_token_id"),
        add_bos=value("tokenizer.ggml.add_bos_token"),
        chat_template=value("tokenizer.chat_template"),
    )
    return Smollm2Source(
        name=value("general.name"),
        licence=value("general.license"),
        shape=shape,
        tokenizer=tokenizer,
        tensors={tensor.name: tensor for tensor in reader.tensors},
    )
