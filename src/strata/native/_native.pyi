"""Types of the extension module; addresses are plain ints, sizes are checked by the Python face."""

from collections.abc import Sequence

class ExpertLayout: ...
class AttentionArgs: ...
class GdnArgs: ...

class Matrices:
    def __init__(self) -> None: ...
    def add(
        self, type: str, rows: int, n_rows: int, n_cols: int, scale: float, tiles: bool
    ) -> None: ...

class Server:
    def __init__(
        self, words: int, ints: int, x: int, rows: int, late: int, d_model: int
    ) -> None: ...
    def add_dense(self) -> None: ...
    def add_layer(self, layout: ExpertLayout, addresses: Sequence[int]) -> None: ...

class Pool:
    def __init__(
        self,
        isa: str,
        workers: int,
        cpus: Sequence[int],
        homes: Sequence[int],
        spin_us: int,
        max_spinners: int,
    ) -> None: ...
    def linears(self, matrices: Matrices, x: int, n_tokens: int, outs: Sequence[int]) -> None: ...
    def submit_experts(
        self,
        layout: ExpertLayout,
        x: int,
        x_stride: int,
        n_x: int,
        n_groups: int,
        address: int,
        start: int,
        n_entries: int,
        row: int,
        token: int,
        out: int,
        out_stride: int,
        n_out: int,
        late: bool,
        layer: int,
    ) -> int: ...
    def submit_experts_apart(
        self,
        layout: ExpertLayout,
        x: int,
        x_stride: int,
        n_x: int,
        n_groups: int,
        address: int,
        start: int,
        n_entries: int,
        row: int,
        token: int,
        out: int,
        out_stride: int,
        n_out: int,
        late: bool,
        layer: int,
    ) -> int: ...
    def attention(self, args: AttentionArgs) -> None: ...
    def gdn(self, args: GdnArgs) -> None: ...
    def serve(self, server: Server, n_rows: int, last: int, done: int, limit_us: int) -> int: ...
    def wait(self, ticket: int) -> None: ...
    def done(self, ticket: int) -> bool: ...
    def counters(self) -> dict[str, int]: ...
    def count_layers(self, n: int) -> None: ...
    def layer_counters(self) -> list[dict[str, int]]: ...
    def add_home(self, memory: int, n_bytes: int, home: int) -> None: ...
    def handovers(self, n: int, pause_us: int) -> list[int]: ...
    def read(self, memory: int, n_bytes: int) -> tuple[int, int]: ...
    def close(self) -> None: ...

def cpu_flags() -> list[str]: ...
def built_isas() -> list[str]: ...
def type_table() -> list[tuple[str, int, int, int, bool]]: ...
def set_grid(name: str, points: int, n_bytes: int) -> bool: ...
def dequantize(isa: str, type: str, raw: int, n_rows: int, n_cols: int, out: int) -> None: ...
def quantize(isa: str, x: int, n_rows: int, n_cols: int, q: int, scale: int, half: int) -> None: ...
def tile_offsets(type: str, n_rows: int, n_cols: int) -> list[int]: ...
def recode(
    isa: str,
    type: str,
    rows: int,
    n_rows: int,
    n_cols: int,
    bits: int,
    stored: int,
    out: int,
    n_bytes: int,
    offsets: Sequence[int],
) -> None: ...
def expert_layout(
    d_model: int,
    d_expert: int,
    gate_type: str,
    up_type: str,
    down_type: str,
    offsets: Sequence[int],
    swiglu_oai: bool,
    limit: float,
    tiles: Sequence[bool],
) -> ExpertLayout: ...
def attention_args(
    q: int,
    k: int,
    v: int,
    kind: int,
    strides: Sequence[int],
    sizes: Sequence[int],
    start: int,
    scale: float,
    window_tokens: int,
    sinks: int,
    selected: int,
    out: int,
) -> AttentionArgs: ...
def gdn_args(
    q: int,
    k: int,
    v: int,
    keep: int,
    beta: int,
    key_head: int,
    state_in: int,
    state_out: int,
    out: int,
    sizes: Sequence[int],
) -> GdnArgs: ...
