"""From bytes to pools and back: how a budget is split, who limits concurrency, and the lines that a boot prints.

`size` does what a boot does: budget and flags in, pools out. `invert` asks the other way round: which flags give
room for so many requests and sessions. Everything is per rank and in bytes, slots or rows (tokens of KV); in the
boot lines "GB" is 2^30 bytes, as in SGLang. Formulas: docs/sizing.md, "The split".

    budget = slots + 1 states | draft states | fixed | rows of KV (and of windows) | less than a page unused
"""

from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, floor

from milepost.core.geometry import KV_DTYPES, Footprint
from milepost.core.window import Windows
from milepost.errors import ConfigError

MIB, GIB = 2**20, 2**30
RATIO = 0.9
WINDOW_RATIO = 0.8
NO_KV_ROWS = 2**24
"""Rows of a model without KV: they cost nothing, they only have to be enough."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What one rank pays for. Bytes, except where a comment says else.

    `reserved`: slots of a running request. `windows`: windows of sliding-window layers that it may hold.
    """

    footprint: Footprint
    reserved: int
    page: int = 1  # tokens
    attn_dp: int = 1  # ranks that divide the requests
    dcp: int = 1  # ranks that divide the KV of one request
    drafts: int = 0  # draft tokens whose states are kept apart; 0 where none are
    draft_row: int = 0  # KV of a token in the draft model
    extra_slot: int = 0
    fixed: int = 0
    windows: int = 1

    @property
    def slot(self) -> int:
        return self.footprint.slot + self.extra_slot

    @property
    def row(self) -> int:
        return self.footprint.row + self.draft_row

    def states(self, slots: int) -> int:
        """Bytes of `slots` slots, the dummy's and the fixed ones included."""
        return (slots + 1) * self.slot + self.fixed

    def draft_states(self, requests: int) -> int:
        """Bytes charged for the draft states of so many running requests: whole slots, one request more."""
        return self.footprint.slot * (requests + 1) * self.drafts if self.drafts else 0


@dataclass(frozen=True, slots=True)
class Wish:
    """The flags. None: not set. Counts are of the whole server; attention DP divides them."""

    ratio: float = RATIO
    slots: int | None = None
    tokens: int | None = None
    running: int | None = None
    radix: bool = True
    context: int = 0  # the longest request, in tokens; 0: unknown
    window_ratio: float = WINDOW_RATIO
    chunked_prefill: int = 2048
    memory_flag: str = "--memory-budget"  # what a refusal names


@dataclass(frozen=True, slots=True)
class Pools:
    """Usable slots and rows of one rank; the dummies come on top.

    `limit` requests may run, `by_rows` if only the KV pool counted. `draft_requests`: requests with draft states.
    """

    slots: int
    rows: int
    limit: int
    by_rows: int
    windows: Windows = Windows()
    draft_requests: int = 0
    notes: tuple[str, ...] = ()


def size(budget: int, costs: Costs, wish: Wish) -> Pools:
    """Split `budget` bytes. Raises `ConfigError` with the smallest value that works."""
    if not costs.slot:
        return _without_states(budget, costs, wish)
    slots = _slots(budget, costs, wish)
    if slots < costs.reserved:
        raise _no_slots(budget, costs, wish, slots)
    drafting = _drafting(costs, wish, slots)
    left = budget - costs.states(slots) - costs.draft_states(drafting)
    rows, windows, notes = _rows(left, costs, wish)
    if rows < max(costs.page, 2):
        raise _no_rows(budget, costs, wish, slots)
    limit, by_rows = running_limit(_running(costs, wish), slots, rows * costs.dcp, wish.context, costs.reserved)
    return Pools(slots, rows, limit, by_rows, windows, drafting + 1 if costs.drafts else 0, notes)


def _running(costs: Costs, wish: Wish) -> int | None:
    """The wanted running requests of one rank."""
    return max(1, wish.running // costs.attn_dp) if wish.running is not None else None


def _drafting(costs: Costs, wish: Wish, slots: int) -> int:
    """Requests whose draft states are reserved, less the spare one."""
    if not costs.drafts:
        return 0
    running = _running(costs, wish)
    if running is None:
        allowed = "must be set with --speculative-num-draft-tokens"
        raise ConfigError("--max-running-requests", "(not set)", allowed, max(1, slots // costs.reserved))
    return min(running, slots // costs.reserved)


def _slots(budget: int, costs: Costs, wish: Wish) -> int:
    """Slots by the first of: pinned, no prefix cache with a running limit, ratio. May be too few."""
    if wish.slots is not None:
        return wish.slots // costs.attn_dp
    running = _running(costs, wish)
    if not wish.radix and running is not None:
        return running
    ratio = Fraction(str(wish.ratio))
    share = budget * ratio / (1 + ratio) - costs.fixed - costs.slot - costs.footprint.slot * costs.drafts
    each = costs.slot + Fraction(costs.footprint.slot * costs.drafts, costs.reserved)
    return floor(share / each)


def _rows(left: int, costs: Costs, wish: Wish) -> tuple[int, Windows, tuple[str, ...]]:
    """Rows of KV and of windows out of `left` bytes, in whole pages, and what to tell the user."""
    page, window = costs.page, costs.footprint.window_row
    if not costs.row:
        return (wish.tokens or NO_KV_ROWS) // page * page, Windows(), ()
    ratio = Fraction(str(wish.window_ratio)) if window else Fraction(0)
    worst = _worst_windows(costs, wish) if window else None
    if worst is not None:
        rows = (left - worst * window) // costs.row // page * page
    else:
        rows = floor(left / (costs.row + ratio * window)) // page * page
    rows, notes = max(0, rows), list[str]()
    if wish.tokens is not None and wish.tokens > rows:
        notes = [f"--max-total-tokens {wish.tokens} is more than the {rows} tokens there is memory for: ignored"]
    elif wish.tokens is not None:
        rows = wish.tokens // page * page
    if not window:
        return rows, Windows(), tuple(notes)
    least = _window_rows(costs)
    windows = Windows(worst or floor(rows * ratio) // page * page, costs.footprint.window_size)
    if windows.rows >= least:
        return rows, windows, tuple(notes)
    works = Fraction(least * costs.row, max(1, left - least * window)) if wish.tokens is None else Fraction(least, rows)
    works *= 1 + Fraction(page, least)  # rows come in whole pages
    if not ratio < works <= 1:
        return 0, windows, ()
    needed = "the window and a page" if costs.windows == 1 else f"{costs.windows} windows and a page"
    allowed = f"leaves {windows.rows} window rows; at least {least} are needed, more than {needed}"
    raise ConfigError("--swa-full-tokens-ratio", float(ratio), allowed, f"{_round_up(works):g}")


def _worst_windows(costs: Costs, wish: Wish) -> int | None:
    """Window rows for the worst case, where requests are all there is: no prefix cache and a running limit."""
    running = _running(costs, wish)
    if wish.radix or running is None:
        return None
    steps = max(1, costs.drafts)
    each = costs.footprint.window_size + 128 * costs.drafts + costs.page + steps
    return -(-(running * each + 2 * wish.chunked_prefill + costs.page) // costs.page) * costs.page


def _window_rows(costs: Costs) -> int:
    """The least rows of a window pool, in whole pages: more than the windows of one request and a page."""
    return ((costs.windows * costs.footprint.window_size) // costs.page + 2) * costs.page


def _without_states(budget: int, costs: Costs, wish: Wish) -> Pools:
    """A model without linear layers: slots cost nothing, so there are enough for what the KV pool lets run."""
    rows, windows, notes = _rows(budget, costs, wish)
    if rows < max(costs.page, 2):
        raise _no_rows(budget, costs, wish, 0)
    by_rows = running_limit(_running(costs, wish), costs.reserved, rows * costs.dcp, wish.context, costs.reserved)[1]
    slots = wish.slots // costs.attn_dp if wish.slots is not None else by_rows * costs.reserved
    return Pools(slots, rows, min(by_rows, slots // costs.reserved), by_rows, windows, 0, notes)


def running_limit(wanted: int | None, slots: int, rows: int, context: int, reserved: int) -> tuple[int, int]:
    """How many requests may run at once: (limit, limit by the KV pool alone).

    Unless `wanted` is given it is estimated from the KV pool as int(rows / context · 512), within 2048 … 4096;
    never more than half the rows, nor than the slots allow at `reserved` slots a request.
    """
    estimate = min(max(int(rows / context * 512) if context else 0, 2048), 4096)
    by_rows = max(1, min(wanted or estimate, rows // 2))
    return min(by_rows, slots // reserved), by_rows


def smallest_budget(costs: Costs, slots: int, wish: Wish, drafting: int = 1) -> int:
    """Bytes for `slots` slots and the least KV that lets a request run, with windows at the wanted ratio."""
    draft_states = costs.draft_states(drafting) if costs.drafts else 0
    rows, window = max(costs.page, 2), costs.footprint.window_row
    if window:
        ratio = Fraction(str(wish.window_ratio))
        rows = max(rows, ceil((_window_rows(costs) + costs.page) / ratio) + costs.page)
        window *= max(ceil(rows * ratio), _worst_windows(costs, wish) or 0)
    return costs.states(slots) + draft_states + rows * costs.row + window


def _no_slots(budget: int, costs: Costs, wish: Wish, slots: int) -> ConfigError:
    """Fewer slots than one request takes: name the flag that made them few, and a value that is enough."""
    need = costs.reserved
    reason = f"one running request takes {need} slots of {human(costs.slot)} and a dummy"
    least = smallest_budget(costs, need, wish)
    if least > budget:
        allowed = f"{reason}; at least {human(least)} are needed, or a bfloat16 state, or more GPUs"
        return ConfigError(wish.memory_flag, human(budget), allowed, human(_budget_for(costs, wish, least)))
    if wish.slots is not None:
        allowed = f"leaves {slots} on each of {costs.attn_dp} attention-DP ranks; {reason}"
        return ConfigError("--max-mamba-cache-size", wish.slots, allowed, need * costs.attn_dp)
    if not wish.radix and wish.running is not None:
        return ConfigError("--max-running-requests", wish.running, reason, need * costs.attn_dp)
    state = costs.states(need) + costs.footprint.slot * 2 * costs.drafts
    works = _round_up(Fraction(state, max(1, budget - state)))
    return ConfigError("--mamba-full-memory-ratio", wish.ratio, f"leaves {max(slots, 0)} slots; {reason}", f"{works:g}")


def _no_rows(budget: int, costs: Costs, wish: Wish, slots: int) -> ConfigError:
    """No KV is left: fewer slots, or more memory."""
    least = smallest_budget(costs, slots, wish, min(_running(costs, wish) or 1, max(1, slots // costs.reserved)))
    fitting = costs.reserved
    if smallest_budget(costs, fitting, wish) > budget or not costs.slot:
        least = smallest_budget(costs, fitting, wish)
        allowed = f"is too small for one request; at least {human(least)} are needed"
        return ConfigError(wish.memory_flag, human(budget), allowed, human(_budget_for(costs, wish, least)))
    if wish.tokens is not None and costs.footprint.window_row and wish.tokens < _window_rows(costs):
        works = ceil((_window_rows(costs) + costs.page) / Fraction(str(wish.window_ratio)))
        allowed = f"is too few for a window pool, at most as large, of {_window_rows(costs)} rows"
        return ConfigError("--max-total-tokens", wish.tokens, allowed, works)
    most = max(fitting, (budget - smallest_budget(costs, 0, wish)) // costs.slot)
    if wish.slots is not None:
        allowed = f"takes {human(costs.states(slots))} of {human(budget)} and leaves no KV; at most {most} fit"
        return ConfigError("--max-mamba-cache-size", wish.slots, allowed, most * costs.attn_dp)
    if wish.tokens is not None and wish.tokens < max(costs.page, 2):
        return ConfigError("--max-total-tokens", wish.tokens, f"must hold a page of {costs.page}", costs.page * 1024)
    if not wish.radix and wish.running is not None:
        allowed = f"takes {human(least)} of {human(budget)}; at most {most} fit"
        return ConfigError("--max-running-requests", wish.running, allowed, most * costs.attn_dp)
    allowed = f"leaves no KV beside {slots} slots in {human(budget)}"
    most_ratio = Fraction(budget, smallest_budget(costs, fitting, wish) - costs.states(fitting)) - 1
    highest = min(Fraction(1, 2), Fraction(floor(most_ratio * 10**6), 10**6))
    return ConfigError("--mamba-full-memory-ratio", wish.ratio, allowed, f"{float(highest):g}")


def _budget_for(costs: Costs, wish: Wish, least: int) -> int:
    """A budget that works with the wanted ratio, too."""
    if wish.slots is not None or (not wish.radix and wish.running is not None):
        return least
    ratio = Fraction(str(wish.ratio))
    state = costs.states(costs.reserved) + costs.footprint.slot * 2 * costs.drafts
    kv = least - costs.states(costs.reserved)
    return max(least, ceil(state * (1 + ratio) / ratio), ceil(kv * (1 + ratio)))


# --- what a boot prints ---------------------------------------------------------------------------------------


def boot_lines(costs: Costs, pools: Pools, whole_kv: bool = False) -> list[str]:
    """The lines on the pools, and the one on the limit where the state pool sets it. Sizes include the dummies.

    `whole_kv`: keys and values as one size, as in SGLang's documents; else apart where its release prints them apart.
    """
    footprint, requests, steps = costs.footprint, pools.draft_requests, costs.drafts
    states = pools.slots + 1
    line = (
        f"Mamba Cache is allocated. max_mamba_cache_size: {pools.slots}, "
        f"conv_state size: {states * footprint.conv / GIB:.2f}GB, "
        f"ssm_state size: {states * footprint.temporal / GIB:.2f}GB"
    )
    if requests:
        line += (
            f" intermediate_ssm_state_cache size: {requests * steps * footprint.temporal / GIB:.2f}GB"
            f" intermediate_conv_window_cache size: {requests * footprint.draft_windows(steps) / GIB:.2f}GB"
        )
    lines = [line] if costs.slot else []
    if footprint.window_row:
        full, window = pools.rows, pools.windows.rows
        lines.append(f"Use sliding window memory pool. full_layer_tokens={full}, swa_layer_tokens={window}")
    share = 0.0 if whole_kv else footprint.key_share
    rows = pools.rows + costs.page
    lines.append(_kv_line(footprint.kv_dtype, pools.rows, rows * footprint.row, share))
    if costs.draft_row:
        lines.append(_kv_line(footprint.kv_dtype, pools.rows, rows * costs.draft_row, share))
    if pools.limit < pools.by_rows:
        lines.append(clamp_line(pools.limit, pools.slots, costs.reserved))
    return lines


def _kv_line(dtype: str, rows: int, size: int, key_share: float) -> str:
    """`size` in bytes; `key_share` of it are keys, 0 to print one size."""
    line = f"KV Cache is allocated. dtype: {KV_DTYPES[dtype]}, #tokens: {rows}, "
    total = size / GIB
    if not key_share:
        return f"{line}KV size: {total:.2f} GB"
    keys = total * key_share
    return f"{line}K size: {keys:.2f} GB, V size: {total - keys:.2f} GB"


def clamp_line(limit: int, slots: int, reserved: int) -> str:
    """The line for when the state pool and not the KV pool limits concurrency."""
    return (
        f"max_running_requests is capped to {limit} by the mamba state cache "
        f"(max_mamba_cache_size={slots}, {reserved} state slots per request)"
    )


def headroom_line(pools: Pools, reserved: int, held: int) -> str | None:
    """What is said where requests reserve more slots than they hold, at the running limit."""
    spare = pools.slots - pools.limit * held
    if held >= reserved or spare <= 0:
        return None
    return f"{reserved} slots are reserved per request and {held} held: {spare} are headroom at {pools.limit} requests"


# --- what the numbers mean ------------------------------------------------------------------------------------


def caps(costs: Costs, pools: Pools, wish: Wish, context: int | None) -> dict[str, int]:
    """Requests that may run at once on one rank, by what limits them; with `context` tokens each if given."""
    limits = {"state": pools.slots // costs.reserved} if costs.slot else {}
    limits["kv"] = pools.by_rows if context is None else pools.rows * costs.dcp // max(1, context)
    if pools.windows.reach:
        whole = costs.windows * pools.windows.reach + costs.page
        limits["windows"] = max(1, (pools.windows.rows - wish.chunked_prefill) // whole)
    running = _running(costs, wish)
    if context is None and running is not None and pools.by_rows == running:
        limits["kv"] = max(pools.rows * costs.dcp // 2, running)
    if running is not None:
        limits["max_running_requests"] = running
    return limits


def binds(limits: dict[str, int]) -> str:
    """Which of the caps is the smallest; the flag where it is no larger than the others."""
    order = ("max_running_requests", "state", "kv", "windows")
    return min((name for name in order if name in limits), key=lambda name: limits[name])


def resident(costs: Costs, pools: Pools, context: int, running: int = 0) -> int:
    """Idle sessions of `context` tokens that stay beside so many running ones: a checkpoint and its KV for each."""
    tokens = _pages(context, costs)
    if running * tokens > pools.rows:
        return 0
    by_rows = (pools.rows - running * tokens) // tokens
    by_slots = pools.slots - running * costs.reserved
    if costs.footprint.window_row:
        by_rows = min(by_rows, pools.windows.rows // (costs.footprint.window_size + costs.page) - running)
    return max(0, min(by_rows, by_slots))


def session_bytes(costs: Costs, context: int, running: bool) -> int:
    """Bytes of one session of `context` tokens: its slots, its KV, its window and its draft states."""
    slots = costs.reserved if running else 1
    windows = costs.footprint.window_row * min(context, costs.footprint.window_size)
    drafts = costs.footprint.slot * costs.drafts if running else 0
    return slots * costs.slot + _pages(context, costs) * costs.row + windows + drafts


def balanced_ratio(costs: Costs, context: int, budget: int, requests: int = 0) -> float:
    """The ratio at which both pools are full with running requests of `context` tokens and nothing else.

    Leaves out retained sessions, further checkpoints of a prompt, host tiers and any trace (docs/sizing.md).
    """
    ratio = costs.reserved * costs.slot * costs.dcp / (costs.row * context)
    fixed = costs.draft_states(requests) + costs.fixed
    if fixed and budget > fixed:
        ratio += fixed / ((budget - fixed) / (1 + ratio))
    return ratio


def _pages(context: int, costs: Costs) -> int:
    """Rows on one rank for `context` tokens."""
    unit = costs.page * costs.dcp
    return max(1, -(-context // unit)) * costs.page


# --- the other way round --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Demand:
    """`running` requests of `context` tokens at once, and `sessions` idle ones of that length kept for reuse."""

    running: int
    context: int
    sessions: int = 0
    chunk: int = 2048  # of a prefill, whose window rows come on top


@dataclass(frozen=True, slots=True)
class Answer:
    """Whether a demand fits, per rank. `flags` are for the whole server; `best` is the nearest demand that fits."""

    fits: bool
    slots: int
    rows: int
    need: int
    have: int
    flags: tuple[tuple[str, float], ...] = ()
    best: Demand | None = None


def invert(budget: int, costs: Costs, demand: Demand) -> Answer:
    """The flags for a demand. Slots: those of running requests, one for each idle session.

    Where a request reserves more than one slot and no idle session could give one up, a spare is added: a publish
    takes a slot before it gives one back.
    """
    slots, rows, ratio, need = _need(costs, demand)
    if need > budget:
        return Answer(False, slots, rows, need, budget, best=_best(budget, costs, demand))
    flags: tuple[tuple[str, float], ...] = (("--max-running-requests", demand.running),)
    if costs.slot:
        flags = (("--max-mamba-cache-size", slots * costs.attn_dp), *flags)
    if ratio:
        flags = (*flags, ("--swa-full-tokens-ratio", ratio))
    return Answer(True, slots, rows, need, budget, flags, demand)


def _need(costs: Costs, demand: Demand) -> tuple[int, int, float, int]:
    """Slots, rows, window rows : rows, and bytes on one rank."""
    running, sessions = -(-demand.running // costs.attn_dp), -(-demand.sessions // costs.attn_dp)
    slots = running * costs.reserved + sessions
    if costs.reserved > 1 and not sessions:
        slots += 1
    rows = max((running + sessions) * _pages(demand.context, costs), costs.page, 2 * running)
    need = costs.states(slots) + costs.draft_states(running)
    if not costs.footprint.window_row:
        return slots, rows, 0.0, need + rows * costs.row
    windows = (running * costs.windows + sessions) * costs.footprint.window_size + (running + sessions) * costs.page
    windows = max(windows + demand.chunk, _window_rows(costs))
    rows = max(rows, _pages(windows, costs))
    ratio = min(1.0, _round_up(Fraction(windows + costs.page, rows)))
    token = costs.row + Fraction(str(ratio)) * costs.footprint.window_row
    return slots, rows, ratio, need + ceil((rows + costs.page) * token)


def _best(budget: int, costs: Costs, demand: Demand) -> Demand | None:
    """Fewer sessions, else fewer requests, else shorter ones; None if not even one token fits."""

    def most(change: str, at_least: int, **fixed: int) -> Demand | None:
        low, high = at_least - 1, getattr(demand, change)
        while low < high:
            middle = (low + high + 1) // 2
            fits = _need(costs, replace(demand, **fixed, **{change: middle}))[-1] <= budget
            low, high = (middle, high) if fits else (low, middle - 1)
        return replace(demand, **fixed, **{change: low}) if low >= at_least else None

    return most("sessions", 0) or most("running", 1, sessions=0) or most("context", 1, running=1, sessions=0)


# --- memory around the pools ----------------------------------------------------------------------------------


def default_fraction(memory: int, chunked_prefill: int, ranks: int) -> float:
    """`--mem-fraction-static` when unset: what activations, graphs and communication leave of `memory` bytes.

    Reserved MiB: 512 + 1.5 · max(chunk, 2048) + 1024 · ranks / 8, at least 10 GiB above 60 GiB. What captured
    graphs take is not known here and not counted.
    """
    total = memory / MIB
    reserved = 512 + 1.5 * max(chunked_prefill, 2048) + ranks / 8 * 1024
    if total > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    return max(0.0, round((total - reserved) / total, 3))


def rest_memory(free: int, weights: int, fraction: float) -> int:
    """Bytes for both pools: `fraction` of the memory that was `free` before loading, less the weights."""
    rest = int(free * Fraction(str(fraction))) - weights
    if rest <= 0:
        least = _round_up(Fraction(weights, free)) if free else 1.0
        if least >= 1:
            allowed = f"no fraction is enough: the weights take {human(weights)} of the {human(free)} that are free"
            raise ConfigError("--mem-fraction-static", fraction, allowed, "0.9 (on a larger device)")
        allowed = f"must be above {least:g}, the part that the weights take ({human(weights)} of {human(free)})"
        raise ConfigError("--mem-fraction-static", fraction, allowed, f"{(1 + least) / 2:.3f}")
    return rest


@dataclass(frozen=True, slots=True)
class HostPools:
    """States and KV rows of the host tier of one rank, and their bytes."""

    states: int
    rows: int
    bytes: int


def host_by_ratio(costs: Costs, pools: Pools, ratio: float) -> HostPools:
    """Each host pool is `ratio` times its device pool (states: one more)."""
    factor = Fraction(str(ratio))
    states, rows = floor(pools.slots * factor) + 1, floor(pools.rows * factor) // costs.page * costs.page
    return HostPools(states, rows, states * costs.footprint.slot + rows * costs.row)


def host_by_size(costs: Costs, pools: Pools, total: int, states: int | None = None) -> HostPools:
    """`total` bytes divided as the device pools are, or with `states` bytes for states."""
    device_states = pools.slots * costs.footprint.slot
    if states is None:
        states = total * device_states // max(1, device_states + pools.rows * costs.row)
    elif states > total:
        allowed = f"must be at most the whole host budget (--hicache-size {total / 1e9:g})"
        raise ConfigError("--hicache-mamba-size", f"{states / 1e9:g}", allowed, f"{total / 2e9:g}")
    count = states // costs.footprint.slot + 1 if costs.footprint.slot else 0
    rows = (total - states) // costs.row // costs.page * costs.page if costs.row else 0
    return HostPools(count, rows, count * costs.footprint.slot + rows * costs.row)


def human(count: int) -> str:
    """Bytes for people, rounded up: a size that was said to be enough has to be enough."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (1024, "KiB")):
        if abs(count) >= unit:
            return f"{ceil(count * 100 / unit) / 100:g}{name}"
    return f"{count}B"


def _round_up(value: Fraction) -> float:
    """Three significant digits, rounded up."""
    if value <= 0:
        return 0.0
    scale = Fraction(1)
    while value * scale < 100:
        scale *= 10
    while value * scale >= 1000:
        scale /= 10
    return float(ceil(value * scale) / scale)
