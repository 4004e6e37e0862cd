"""Types of the extension module; addresses are plain ints, sizes are checked by the Python face."""

def has_avx2() -> bool: ...

class Ops:
    def __init__(self, isa: str) -> None: ...
    def rms_norm(
        self, n_rows: int, x: int, weight: int, groups: int, part: int, eps: float, out: int
    ) -> None: ...
    def read_gates(self, n_tokens: int, low: int, rank: int, coeff: int, streams: int) -> None: ...
    def stream_mix(
        self, n_tokens: int, normed: int, gate: int, streams: int, width: int, out: int
    ) -> None: ...
    def stream_write(
        self, n_tokens: int, residual: int, y: int, coeff: int, streams: int, width: int
    ) -> None: ...
    def silu_times(self, n_tokens: int, gate: int, up: int, width: int) -> None: ...
    def sigmoid_times(
        self, n_tokens: int, y: int, gate: int, width: int, one_gate: bool
    ) -> None: ...
    def gated_norm(
        self,
        n_tokens: int,
        o: int,
        z: int,
        weight: int,
        heads: int,
        width: int,
        eps: float,
        silu: bool,
        out: int,
    ) -> None: ...
    def combine(
        self,
        n_tokens: int,
        rows: int,
        weight: int,
        n_active: int,
        width: int,
        shared: int,
        out: int,
    ) -> None: ...
    def gdn_inputs(
        self,
        n_tokens: int,
        ring: int,
        entries: int,
        start: int,
        x: int,
        weight: int,
        taps: int,
        a: int,
        b: int,
        decay: int,
        dt_bias: int,
        n_k_heads: int,
        n_v_heads: int,
        k_dim: int,
        v_dim: int,
        q: int,
        k: int,
        v: int,
        keep: int,
        beta: int,
    ) -> None: ...
    def ngram_gate(
        self, n_tokens: int, key: int, query: int, value: int, streams: int, width: int, u: int
    ) -> None: ...
    def ngram_conv(
        self,
        n_tokens: int,
        ring: int,
        entries: int,
        start: int,
        x: int,
        n: int,
        weight: int,
        taps: int,
        dilation: int,
        u: int,
        residual: int,
    ) -> None: ...
    def head_rotary(
        self,
        n_tokens: int,
        x: int,
        token_stride: int,
        head_stride: int,
        heads: int,
        d: int,
        weight: int,
        eps: float,
        cos: int,
        sin: int,
        pairs: int,
        step: int,
        halves: bool,
        kind: int,
        out: int,
        out_token_stride: int,
        out_head_stride: int,
    ) -> None: ...
    def block_keys(
        self,
        n_blocks: int,
        ring: int,
        entries: int,
        start: int,
        raw: int,
        d: int,
        first_block: int,
        r: int,
        weight: int,
        eps: float,
        cos: int,
        sin: int,
        pairs: int,
        halves: bool,
        kind: int,
        out: int,
    ) -> None: ...
    def ring_store(
        self, n_tokens: int, ring: int, entries: int, start: int, x: int, n: int
    ) -> None: ...
    def select_blocks(
        self,
        n_tokens: int,
        q: int,
        heads: int,
        d: int,
        keys: int,
        kind: int,
        start: int,
        r: int,
        budget: int,
        kept: int,
    ) -> None: ...
    def token_mask(
        self, n_tokens: int, kept: int, budget: int, start: int, n: int, r: int, seen: int
    ) -> None: ...
    def route(
        self,
        n_tokens: int,
        logits: int,
        bias: int,
        n_experts: int,
        n_active: int,
        scoring: int,
        normalize: bool,
        scale: float,
        correction: int,
        n_groups: int,
        groups_kept: int,
        expert: int,
        weight: int,
    ) -> None: ...
    def copy_rows(
        self, n: int, index: int, source: int, out: int, n_rows: int, width: int
    ) -> int: ...
    def group_rows(
        self,
        n_rows: int,
        expert: int,
        n_active: int,
        fast: int,
        n_experts: int,
        fast_place: int,
        other_place: int,
        lists: int,
        place: int,
    ) -> tuple[int, int, int, int]: ...
