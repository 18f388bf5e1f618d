"""What an SGLang boot log says about memory: pools, bytes of a slot and of a row, and the geometry that explains them.

Reads text only. A log prints sizes in GiB with two decimals, so a byte count is known as an interval; where a
geometry reproduces every printed digit, its exact bytes replace the interval. Lines of several ranks may be mixed:
the first rank that allocated both pools is read, the others are compared with it.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from milepost.core.geometry import KV_DTYPES, Footprint, Formats, Index, Layout, Model, kv_dtype, measure
from milepost.core.sizing import GIB
from milepost.errors import ConfigError, MilepostError

_NUMBER = r"(\d+(?:\.\d+)?)"
_GB = rf"[\s:=]*{_NUMBER}\s*GB"
_RANK = re.compile(r"^\s*\[[^\]]*?((?:\b(?:DP|PP|CP|TP|EP)\d+\s*)+)\]")
_MAMBA = re.compile(r"Mamba Cache is (?:allocated|reserved)")
_KV = re.compile(r"KV Cache is (?:allocated|reserved)|KV Cache.*VA upper bound")
_SLOTS = re.compile(r"max_mamba_cache_size[:=]\s*(\d+)")
_CAPPED = re.compile(
    r"max_running_requests is capped to (\d+) by the mamba state cache.*?(\d+) state slots per request"
)
_WINDOWS = re.compile(r"full_layer_tokens=(\d+)[,\s]+swa_layer_tokens=(\d+)")
_FINAL = re.compile(r"max_total_num_tokens=(\d+).*?max_running_requests=(\d+)(?:.*?context_len=(\d+))?")
_PAGE = re.compile(r"\bpage_size=(\d+)")
_TP = re.compile(r"\btp_size=(\d+)")


@dataclass(frozen=True, slots=True)
class Printed:
    """A size in GiB as printed: `text` with its decimals."""

    text: str

    @property
    def bytes(self) -> int:
        return round(float(self.text) * GIB)

    @property
    def margin(self) -> int:
        """Half of the last digit, in bytes."""
        decimals = len(self.text.partition(".")[2])
        return int(GIB / (2 * 10.0**decimals))

    def fits(self, count: float) -> bool:
        decimals = len(self.text.partition(".")[2])
        return f"{count / GIB:.{decimals}f}" == self.text


@dataclass(frozen=True, slots=True)
class BootLog:
    """One rank's lines. None: not printed. `draft_kv` are the KV sizes of a draft model."""

    rank: str
    slots: int
    conv: Printed
    temporal: Printed
    tokens: int
    kv: tuple[Printed, ...]  # one latent, or keys and values
    kv_name: str | None = None
    draft_temporal: Printed | None = None
    draft_conv: Printed | None = None
    draft_kv: tuple[Printed, ...] = ()
    window_tokens: int | None = None
    limit: int | None = None
    reserved: int | None = None
    context: int | None = None
    page: int | None = None
    tp: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def slot_bytes(self) -> tuple[int, int]:
        """Lowest and highest bytes of a slot; the dummy is counted in the sizes."""
        total, margin = self.conv.bytes + self.temporal.bytes, self.conv.margin + self.temporal.margin
        return -(-(total - margin) // (self.slots + 1)), (total + margin) // (self.slots + 1)

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Lowest and highest bytes of a row of the model; the padding page may or may not be in the size."""
        total, margin = sum(size.bytes for size in self.kv), sum(size.margin for size in self.kv)
        return -(-(total - margin) // (self.tokens + (self.page or 1))), (total + margin) // self.tokens

    @property
    def rest(self) -> int:
        """Bytes of everything that the lines count: what was left for the pools, less than a page short."""
        sizes = [self.conv, self.temporal, *self.kv, *self.draft_kv]
        sizes += [size for size in (self.draft_temporal, self.draft_conv) if size is not None]
        return sum(size.bytes for size in sizes)

    @property
    def kv_dtype(self) -> str | None:
        """The KV dtype, if the log names one that is known."""
        names = {name: kind for kind, name in reversed(KV_DTYPES.items())}
        return names.get(self.kv_name or "")


def read(text: str) -> BootLog:
    """The first complete rank of a log. Raises `MilepostError` if there is none."""
    ranks: dict[str, list[str]] = {}
    common: list[str] = []
    for line in _joined(text.splitlines()):
        tag = _RANK.match(line)
        relevant = _MAMBA.search(line) or _KV.search(line) or _CAPPED.search(line) or _FINAL.search(line)
        if relevant or _WINDOWS.search(line):
            ranks.setdefault(" ".join(tag[1].split()) if tag else "", []).append(line)
        elif _PAGE.search(line) or _TP.search(line):
            common.append(line)
    common += [line for lines in ranks.values() for line in lines if _FINAL.search(line)]
    logs = [log for rank, lines in ranks.items() if (log := _rank(rank, lines, common)) is not None]
    if not logs:
        raise MilepostError(
            "the log has no rank with both a 'Mamba Cache is allocated' and a 'KV Cache is allocated' line"
        )
    first, notes = logs[0], []
    for other in logs[1:]:
        if (other.slots, other.tokens) != (first.slots, first.tokens):
            notes.append(f"rank {other.rank}: {other.slots} slots, {other.tokens} tokens, unlike rank {first.rank}")
    if any("VA upper bound" in line for line in ranks[first.rank]):
        notes.append("the KV size is an upper bound that is resized after capture; trust the last #tokens")
    return replace(first, notes=tuple(notes))


def _joined(lines: Iterable[str]) -> Iterator[str]:
    """Lines with their continuations: some terminals wrap a long line and indent the rest."""
    held = ""
    for line in lines:
        if held and line.startswith((" ", "\t")) and not _RANK.match(line):
            held += " " + line.strip()
            continue
        if held:
            yield held
        held = line
    if held:
        yield held


def _rank(rank: str, lines: list[str], common: list[str]) -> BootLog | None:
    mamba = next((line for line in lines if _MAMBA.search(line)), None)
    kvs = [kv for line in lines if _KV.search(line) and (kv := _kv(line)) is not None]
    if mamba is None or not kvs:
        return None
    slots, conv, temporal = _SLOTS.search(mamba), _printed(mamba, "conv_state size"), _printed(mamba, "ssm_state size")
    if slots is None or conv is None or temporal is None:
        return None
    tokens, name, sizes = kvs[0]
    draft = kvs[1][2] if len(kvs) > 1 and kvs[1][0] == tokens else ()
    everything = [*lines, *common]
    capped, final = _first(_CAPPED, everything), _first(_FINAL, everything)
    windows = _first(_WINDOWS, everything)
    page, tp = _first(_PAGE, everything), _first(_TP, everything)
    limit = final[2] if final else capped[1] if capped else None
    return BootLog(
        rank,
        int(slots[1]),
        conv,
        temporal,
        tokens,
        sizes,
        name,
        _printed(mamba, "intermediate_ssm_state_cache size"),
        _printed(mamba, "intermediate_conv_window_cache size"),
        draft,
        int(windows[2]) if windows else None,
        int(limit) if limit else None,
        int(capped[2]) if capped else None,
        int(final[3]) if final and final[3] else None,
        int(page[1]) if page else None,
        int(tp[1]) if tp else None,
    )


def _first(pattern: re.Pattern[str], lines: list[str]) -> re.Match[str] | None:
    return next((match for line in lines if (match := pattern.search(line))), None)


def _printed(line: str, name: str) -> Printed | None:
    match = re.search(rf"\b{re.escape(name)}{_GB}", line)
    return Printed(match[1]) if match else None


def _kv(line: str) -> tuple[int, str | None, tuple[Printed, ...]] | None:
    """Tokens, dtype and sizes of a line on a KV pool."""
    tokens, name = re.search(r"#tokens[:=]\s*(\d+)", line), re.search(r"dtype[:=]\s*([\w.]+)", line)
    sizes = [_printed(line, what) for what in ("K size", "V size")]
    if None in sizes:
        sizes = [_printed(line, "KV size")]
    found = tuple(size for size in sizes if size is not None)
    return (int(tokens[1]), name[1] if name else None, found) if tokens and found else None


# --- which geometry explains the numbers ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Explanation:
    """A geometry and what it reproduces. `differences` name what does not fit, with both numbers."""

    model: str
    layout: Layout
    formats: Formats
    footprint: Footprint
    draft_layers: int = 0
    draft_steps: int = 0
    differences: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        return not self.differences

    @property
    def text(self) -> str:
        parts = [self.model, f"TP {self.layout.tp}", f"{self.formats.state} state", f"{self.formats.kv} KV"]
        if self.formats.scaled:
            parts.append("scaled layout")
        if self.formats.index_pool is not None:
            parts.append(f"index pooled by {self.formats.index_pool}")
        if self.draft_layers:
            parts.append(f"{self.draft_layers} draft layer{'s' * (self.draft_layers > 1)} in the KV")
        if self.draft_steps:
            parts.append(f"{self.draft_steps} draft tokens")
        return ", ".join(parts)


def compare(log: BootLog, model: Model, layout: Layout, formats: Formats, draft_layers: int = 0) -> Explanation:
    """One geometry against the printed digits."""
    footprint = measure(model, layout, formats)
    row = footprint.row + draft_layers * footprint.layer_row
    states, wrong = log.slots + 1, []
    pairs = [("conv_state", log.conv, footprint.conv), ("ssm_state", log.temporal, footprint.temporal)]
    for name, printed, each in pairs:
        if not printed.fits(states * each):
            wrong.append(f"{name}: log {printed.text} GB, geometry {states * each / GIB:.2f} GB ({each} B a slot)")
    if len(log.kv) == 1:
        shares = [("KV", log.kv[0], 1.0)]
    else:
        share = footprint.key_share or 0.5
        shares = [("K", log.kv[0], share), ("V", log.kv[1], 1 - share)]
    for name, printed, share in shares:
        page = log.page or 64
        if not any(printed.fits((log.tokens + pad) * row * share) for pad in (0, 1, page)):
            size = (log.tokens + page) * row * share / GIB
            wrong.append(f"{name}: log {printed.text} GB, geometry {size:.2f} GB ({row} B a token)")
    steps, difference = _draft_steps(log, footprint)
    wrong += difference
    footprint = replace(footprint, row=row)
    return Explanation(model.name, layout, formats, footprint, draft_layers, steps, tuple(wrong))


def _draft_steps(log: BootLog, footprint: Footprint) -> tuple[int, list[str]]:
    """Draft tokens by the draft lines, and what does not fit: temporal rows must be (requests + 1) · steps."""
    if log.draft_temporal is None or not footprint.temporal:
        return 0, []
    found = log.draft_temporal.bytes / footprint.temporal
    requests = (log.limit or log.slots) + 1
    steps = max(1, round(found / requests))
    wrong = []
    if not log.draft_temporal.fits(requests * steps * footprint.temporal):
        rows = f"{found:.1f} draft states are no multiple of {requests} requests"
        wrong.append(f"intermediate_ssm: log {log.draft_temporal.text} GB, {rows}")
    elif log.draft_conv is not None and not log.draft_conv.fits(requests * footprint.draft_windows(steps)):
        size = requests * footprint.draft_windows(steps) / GIB
        wrong.append(f"intermediate_conv: log {log.draft_conv.text} GB, geometry {size:.2f} GB")
    return steps, wrong


def explain(log: BootLog, candidates: Iterable[Model], layout: Layout | None, formats: Formats) -> list[Explanation]:
    """All geometries that reproduce the log, or the one that comes nearest; state dtypes and layouts are tried.

    `layout` None: tensor parallelism of 1 … 16. The KV dtype is the log's where it names one, else all are tried.
    """
    models = list(candidates)
    tps = [log.tp] if log.tp else [1, 2, 4, 8, 16]
    layouts = [layout] if layout is not None else [Layout(tp=tp) for tp in tps]
    kinds = [log.kv_dtype] if log.kv_dtype else ["bfloat16", "fp8_e4m3"]
    kinds = [formats.kv, *(kind for kind in kinds if kind != formats.kv)] if log.kv_dtype is None else kinds
    tried: list[Explanation] = []
    for model in models:
        for one in layouts:
            tried += _tries(log, model, one, formats, kinds)
    if not tried:
        raise ConfigError("--tp", layouts[0].tp, "none of the models can be laid out that way", 1)
    simplest: dict[tuple[str, Layout], Explanation] = {}
    for found in tried:  # the first of a model and layout needs the fewest assumptions
        if found.exact:
            simplest.setdefault((found.model, found.layout), found)
    return list(simplest.values()) or [min(tried, key=lambda found: len(found.differences))]


def _tries(log: BootLog, model: Model, layout: Layout, formats: Formats, kinds: list[str]) -> list[Explanation]:
    """From the given formats outwards: state dtypes, then KV layouts, then draft layers."""
    states = [formats.state, *(name for name in ("float32", "bfloat16") if name != formats.state)]
    variants = [(formats.scaled, formats.index_pool)]
    if isinstance(model.index, Index):
        variants += [(scaled, pool) for scaled in (False, True) for pool in (None, 1) if (scaled, pool) != variants[0]]
    found = []
    for draft_layers in (0, 1, 2):
        for scaled, pool in variants:
            for kind in kinds:
                for state in states:
                    tried = replace(formats, state=state, kv=kv_dtype(kind), scaled=scaled, index_pool=pool)
                    try:
                        found.append(compare(log, model, layout, tried, draft_layers))
                    except ConfigError:
                        return found
    return found
