"""The shape of a decoder, and what follows from it: parameters, operations, bytes."""

from typing import NamedTuple

from headlab.costs.arithmetic import HeadCost, linear_head_cost


class Architecture(NamedTuple):
    """A decoder of blocks of attention and MLP under one linear head, in numbers."""

    name: str
    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_head: int  # width of an attention head
    d_mlp: int
    gated: bool  # an MLP of three matrices
    tied: bool  # the head's matrix is the input table
    learned_positions: int = 0  # rows of a table of positions
    qkv_bias: bool = False
    output_bias: bool = False  # of the attention
    mlp_bias: bool = False
    head_bias: bool = False
    norms_per_block: int = 2
    norm_bias: bool = False  # LayerNorm with a bias
    qk_norm: bool = False  # a norm of d_head for queries and one for keys
    window: int | None = None  # tokens that a windowed layer attends to
    n_windowed: int = 0  # layers with a window

    def parameters(self) -> dict[str, int]:
        """Numbers by part: "embedding" (with a tied table), "positions", "blocks", "norm", "head", "total"."""
        table = self.vocab_size * self.d_model
        parts = {
            "embedding": table,
            "positions": self.learned_positions * self.d_model,
            "blocks": self.n_layers * (self.block_matrices() + self._block_vectors()),
            "norm": self.d_model * (1 + self.norm_bias),
            "head": (0 if self.tied else table) + self.vocab_size * self.head_bias,
        }
        return {**parts, "total": sum(parts.values())}

    def block_matrices(self) -> int:
        """Entries of the matrices of one block."""
        attention = 2 * self.d_model * self.d_head * (self.n_heads + self.n_kv_heads)
        return attention + self.d_model * self.d_mlp * (3 if self.gated else 2)

    def block_flops(self, context: int) -> float:
        """Forward operations a token of one block, the mean over layers; attention sees `context` positions.

        2·(entries of its matrices), and 2·2·n_heads·d_head for each position seen.
        """
        seen = sum(self._seen(context)) / self.n_layers
        return 2.0 * self.block_matrices() + 4.0 * self.n_heads * self.d_head * seen

    def head_cost(self, mode, itemsize: int) -> HeadCost:
        """That of its linear head."""
        own = self.parameters()["head"]
        return linear_head_cost(
            mode,
            vocab_size=self.vocab_size,
            d_model=self.d_model,
            own_parameters=own,
            itemsize=itemsize,
        )

    def body_bytes(self, itemsize: int) -> float:
        """Bytes of parameters that a decode step reads below the head: blocks and norm, not the rows it looks up."""
        parts = self.parameters()
        return float((parts["blocks"] + parts["norm"]) * itemsize)

    def kv_bytes(self, context: int, itemsize: int) -> float:
        """Bytes of keys and values that one sequence keeps: 2·n_kv_heads·d_head numbers a layer and token."""
        return float(2 * self.n_kv_heads * self.d_head * itemsize * sum(self._seen(context)))

    def _seen(self, context: int) -> list[int]:
        """Positions that each layer attends to."""
        near = context if self.window is None else min(context, self.window)
        return [near] * self.n_windowed + [context] * (self.n_layers - self.n_windowed)

    def _block_vectors(self) -> int:
        """Numbers of a block that stand in no matrix."""
        narrow, wide = self.n_kv_heads * self.d_head, self.n_heads * self.d_head
        norms = self.norms_per_block * self.d_model * (1 + self.norm_bias)
        qkv = (wide + 2 * narrow) * self.qkv_bias
        output = self.d_model * self.output_bias
        mlp = (self.d_mlp * (2 if self.gated else 1) + self.d_model) * self.mlp_bias
        return norms + qkv + output + mlp + 2 * self.d_head * self.qk_norm
