"""What routing rules do to the adapters on many replicas: a simulation, without an engine or a network.

python -m bench.scale.cluster_routing [--replicas 64] [--adapters 10000] [--requests 40000] [--alpha 1.0] [--ingresses
                                4] [--report-seconds 0.5] [--load 0.7] [--rows-for 64] [--json FILE]
python -m bench.scale.cluster_routing --sessions 64 --replicas 2 --ingresses 1 [--cache-tokens 100000] [--load 0.7]

Requests arrive at random (Poisson), their adapters by Zipf's law; one in eight asks for the base. A replica computes
its requests one after another at a fixed rate and holds the adapters used last on its device and in host memory; a
missing one costs time first. Each ingress knows of a replica what that reported last, and what it has itself sent
since. Half-way one replica in sixteen fails (what it had to do is lost, and counted), at three quarters as many join.

hit rate   requests for adapters that were on the device when they began
loads      adapters brought to a device, and of these from disk, per request for an adapter
imbalance  the busiest replica's tokens through the mean, of windows of 100 requests for each replica, the mean of these
moved      adapters whose first choice is another one after the failure and the join, through the least that must
           move; nothing where a rule has no first choice
wait       seconds in the queue and for the adapter, the 99th percentile

With --sessions it simulates chats instead: of 12 turns each, of 60 to 300 tokens and answers of 20 to 400, over one of
eight system prompts of 1,500 tokens, another one beginning when one ends. Half of them have one of a few adapters. A
replica keeps the blocks that were used last. `of one`: prompt tokens found, of those that one replica as fast and as
large as all together finds.
"""

from __future__ import annotations

import argparse
import bisect
import heapq
import itertools
import json
import math
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from service.cluster.routing import Demand, Prefixes, Replica, Rule, beginnings, choose, preference
from service.engine.ipc.messages import Tier

TOKENS_PER_SECOND = 4000.0
TOKENS_PER_REQUEST = 400.0
HOST_SECONDS, DISK_SECONDS = 0.005, 0.050
ROWS = 16
RULE = Rule(host_tokens=HOST_SECONDS * TOKENS_PER_SECOND, disk_tokens=DISK_SECONDS * TOKENS_PER_SECOND)
_WINDOW = 100


@dataclass
class SimulatedReplica:
    """`free_seconds`: when it has done all it has. Adapters on the device and in host memory, the last used last."""

    name: str
    num_device: int
    free_seconds: float = 0.0
    device: OrderedDict[str, None] = field(default_factory=OrderedDict)
    host: OrderedDict[str, None] = field(default_factory=OrderedDict)
    # Begin of each request that has not ended when it was sent, its adapter.
    pending: deque[tuple[float, str | None]] = field(default_factory=deque)

    def take(self, digest: str | None, num_tokens: float, now_seconds: float) -> tuple[Tier, float]:
        """Where the adapter was, and how long the request waits."""
        tier, load_seconds = self._bring(digest)
        begins = max(self.free_seconds, now_seconds) + load_seconds
        self.free_seconds = begins + num_tokens / TOKENS_PER_SECOND
        self.pending.append((self.free_seconds, digest))
        return tier, begins - now_seconds

    def queued_tokens(self, now_seconds: float) -> float:
        return max(0.0, self.free_seconds - now_seconds) * TOKENS_PER_SECOND

    def running(self, now_seconds: float) -> list[str]:
        """Adapters of requests that wait or run."""
        while self.pending and self.pending[0][0] <= now_seconds:
            self.pending.popleft()
        return [digest for _, digest in self.pending if digest is not None]

    def _bring(self, digest: str | None) -> tuple[Tier, float]:
        if digest is None or digest in self.device:
            if digest is not None:
                self.device.move_to_end(digest)
            return "device", 0.0
        tier: Tier = "host" if digest in self.host else "disk"
        for held, most in ((self.host, 8 * self.num_device), (self.device, self.num_device)):
            held[digest] = None
            held.move_to_end(digest)
            if len(held) > most:
                held.popitem(last=False)
        return tier, HOST_SECONDS if tier == "host" else DISK_SECONDS


class View:
    """What one ingress knows: reports as they were when they came, and its own sends since."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.demand = Demand()
        self.turn = itertools.count(seed)
        self.reports: dict[str, tuple[float, dict[str, Tier], list[str]]] = {}
        self.sent: dict[str, float] = {}

    def report(self, one: SimulatedReplica, now_seconds: float) -> None:
        tiers: dict[str, Tier] = {**dict.fromkeys(one.host, "host"), **dict.fromkeys(one.device, "device")}
        self.reports[one.name] = one.queued_tokens(now_seconds), tiers, one.running(now_seconds)
        self.sent[one.name] = 0.0

    def load(self, name: str) -> float:
        return self.reports[name][0] + self.sent[name]


SimulatedRequest = tuple[str | None, str, float]
Choice = Callable[[View, Sequence[SimulatedReplica], SimulatedRequest], str]


def ours(view: View, replicas: Sequence[SimulatedReplica], request: SimulatedRequest) -> str:
    """`service.cluster.routing`."""
    digest, key, now_seconds = request
    homes = view.demand.ask(digest, TOKENS_PER_REQUEST, len(replicas), now_seconds, RULE)
    known = [
        Replica(one.name, view.load(one.name), ROWS * (one.num_device - len(one.device)), view.reports[one.name][1])
        for one in replicas
    ]
    return choose(digest, ROWS, TOKENS_PER_REQUEST, known, key=key, num_homes=homes, rule=RULE)[0]


def at_random(view: View, replicas: Sequence[SimulatedReplica], _request: SimulatedRequest) -> str:
    """Any replica."""
    return view.random.choice(replicas).name


def round_robin(view: View, replicas: Sequence[SimulatedReplica], _request: SimulatedRequest) -> str:
    """vLLM production-stack's default; of its rules none looks at adapters."""
    return replicas[next(view.turn) % len(replicas)].name


def session(_view: View, replicas: Sequence[SimulatedReplica], request: SimulatedRequest) -> str:
    """production-stack's session rule with the adapter as the session: consistent hashing without a bound."""
    digest, key, _ = request
    return preference(digest or key, tuple(sorted(one.name for one in replicas)))[0]


def multiplexed(view: View, replicas: Sequence[SimulatedReplica], request: SimulatedRequest) -> str:
    """Ray Serve's: of the replicas that have the model loaded, else of those with the fewest, two at random, of which
    the one with the shorter queue. Its replicas forget the models used longest ago, by count."""
    digest, _, _ = request
    holders = [one for one in replicas if digest is not None and view.reports[one.name][1].get(digest) == "device"]
    if not holders and digest is not None:
        counts = {one.name: sum(tier == "device" for tier in view.reports[one.name][1].values()) for one in replicas}
        fewest = min(counts.values())
        holders = [one for one in replicas if counts[one.name] == fewest]
    among = holders or list(replicas)
    two = view.random.sample(among, min(2, len(among)))
    return min(two, key=lambda one: view.load(one.name)).name


def inference_extension(view: View, replicas: Sequence[SimulatedReplica], request: SimulatedRequest) -> str:
    """The Gateway API inference extension's LoRA scorer as llm-d has it, where servers report adapters in flight."""
    return _by_lora_scorer(view, replicas, request, lambda name: set(view.reports[name][2]))


def inference_extension_of_residents(
    view: View, replicas: Sequence[SimulatedReplica], request: SimulatedRequest
) -> str:
    """The same scorer, where servers report adapters on the device too."""

    def told(name: str) -> set[str]:
        _, tiers, in_flight = view.reports[name]
        return {*in_flight, *(digest for digest, tier in tiers.items() if tier == "device")}

    return _by_lora_scorer(view, replicas, request, told)


def _by_lora_scorer(
    view: View, replicas: Sequence[SimulatedReplica], request: SimulatedRequest, told: Callable[[str], set[str]]
) -> str:
    """1.0 for those that report the adapter, 0.8 where they report fewer than fit, else 0; added to a score of 1 for
    the shortest queue down to 0 for the longest. The highest sum wins, any of several."""
    digest, _, _ = request
    loads = [view.load(one.name) for one in replicas]
    low, high = min(loads), max(loads)

    def score(one: SimulatedReplica, load: float) -> float:
        reported = told(one.name)
        lora = 0.8 if len(reported) < one.num_device else 0.0
        lora = 0.0 if digest is None else 1.0 if digest in reported else lora
        return lora + (1.0 if high == low else (high - load) / (high - low))

    scores = [score(one, load) for one, load in zip(replicas, loads, strict=True)]
    best = max(scores)
    return view.random.choice([one for one, value in zip(replicas, scores, strict=True) if value == best]).name


RULES: dict[str, Choice] = {
    "multilora": ours,
    "random": at_random,
    "round-robin (production-stack)": round_robin,
    "session (production-stack)": session,
    "multiplexed (Ray Serve)": multiplexed,
    "LoRA scorer (inference extension)": inference_extension,
    "LoRA scorer, told of residents": inference_extension_of_residents,
}


@dataclass
class Figures:
    """See the module's docstring."""

    hit_rate: float = 0.0
    loads: float = 0.0
    disk_loads: float = 0.0
    imbalance: float = 0.0
    moved: float | None = None
    wait_p99_seconds: float = 0.0
    lost: int = 0


def simulate(name: str, given: argparse.Namespace) -> Figures:
    """One rule on the load that the arguments describe; the same arrivals for each rule."""
    chance = random.Random(given.seed)
    digests = [f"{one:064x}" for one in range(given.adapters)]
    weights = list(itertools.accumulate(1 / (one + 1) ** given.alpha for one in range(given.adapters)))
    replicas = [SimulatedReplica(f"replica-{one}", given.rows_for) for one in range(given.replicas)]
    views = [View(seed) for seed in range(given.ingresses)]
    rate = given.load * given.replicas * TOKENS_PER_SECOND / TOKENS_PER_REQUEST
    reports = [(given.report_seconds * one / given.replicas, one) for one in range(given.replicas)]
    heapq.heapify(reports)
    for view, one in itertools.product(views, replicas):
        view.report(one, 0.0)
    num_fail = given.replicas // 16
    now, seen = 0.0, {"device": 0, "host": 0, "disk": 0}
    waits: list[float] = []
    window: dict[str, float] = {}
    imbalances: list[float] = []
    figures = Figures()
    for number in range(given.requests):
        now += chance.expovariate(rate)
        if num_fail and number == given.requests // 2:
            figures.lost = sum(len(one.running(now)) for one in replicas[-num_fail:])
            replicas = replicas[:-num_fail]
        if number == given.requests * 3 // 4:
            for late in range(num_fail):
                replicas.append(SimulatedReplica(f"replica-late-{late}", given.rows_for))
                for view in views:
                    view.report(replicas[-1], now)
        while reports[0][0] <= now:
            due, which = heapq.heappop(reports)
            heapq.heappush(reports, (due + given.report_seconds, which))
            if which < len(replicas):
                for view in views:
                    view.report(replicas[which], due)
        digest = digests[bisect.bisect(weights, chance.random() * weights[-1])] if chance.random() >= 0.125 else None
        view = views[number % len(views)]
        chosen = RULES[name](view, replicas, (digest, str(number), now))
        replica = next(one for one in replicas if one.name == chosen)
        view.sent[chosen] += TOKENS_PER_REQUEST
        tier, wait = replica.take(digest, TOKENS_PER_REQUEST, now)
        waits.append(wait)
        if digest is not None:
            seen[tier] += 1
        window[chosen] = window.get(chosen, 0.0) + 1
        if sum(window.values()) >= _WINDOW * len(replicas):
            imbalances.append(max(window.values()) / _WINDOW)
            window.clear()
    asked = sum(seen.values())
    figures.hit_rate, figures.disk_loads = seen["device"] / asked, seen["disk"] / asked
    figures.loads = 1 - figures.hit_rate
    figures.imbalance = sum(imbalances) / len(imbalances) if imbalances else math.nan
    figures.wait_p99_seconds = sorted(waits)[int(0.99 * len(waits))]
    if num_fail and RULES[name] in (ours, session):
        figures.moved = moves(digests, given.replicas, num_fail)
    return figures


def moves(digests: Sequence[str], num_replicas: int, num_fail: int) -> float:
    """Adapters with another first home after a failure and a join, through the least that must move."""
    before = tuple(sorted(f"replica-{one}" for one in range(num_replicas)))
    after = tuple(sorted(f"replica-{one}" for one in range(num_replicas - num_fail)))
    joined = tuple(sorted((*after, *(f"replica-late-{one}" for one in range(num_fail)))))
    moved = sum(preference(one, before)[0] != preference(one, after)[0] for one in digests)
    moved += sum(preference(one, after)[0] != preference(one, joined)[0] for one in digests)
    return moved / (2 * len(digests) * num_fail / num_replicas)


NUM_SYSTEMS, SYSTEM_TOKENS, NUM_TURNS, BLOCK_TOKENS = 8, 1500, 12, 16


@dataclass
class Chat:
    """tokens: of all turns so far."""

    name: str
    adapter: str | None
    tokens: list[int]
    num_turns: int = 0


class CachedReplica:
    """Computes one request after another, and keeps the blocks of tokens that were used last."""

    def __init__(self, name: str, cache_tokens: int, tokens_per_second: float) -> None:
        self.name, self.free_seconds = name, 0.0
        self._most_blocks, self._tokens_per_second = cache_tokens // BLOCK_TOKENS, tokens_per_second
        self._blocks: OrderedDict[tuple[str | None, int], None] = OrderedDict()

    def queued_tokens(self, now_seconds: float) -> float:
        return max(0.0, self.free_seconds - now_seconds) * self._tokens_per_second

    def take(self, chat: Chat, num_output: int, now_seconds: float) -> tuple[int, float]:
        """Prompt tokens that are found, and how long the request waits."""
        ends = range(BLOCK_TOKENS, len(chat.tokens), BLOCK_TOKENS)
        keys = [(chat.adapter, hash(tuple(chat.tokens[:end]))) for end in ends]
        found = next((number for number, key in enumerate(keys) if key not in self._blocks), len(keys)) * BLOCK_TOKENS
        begins = max(self.free_seconds, now_seconds)
        self.free_seconds = begins + (len(chat.tokens) - found + num_output) / self._tokens_per_second
        for key in reversed(keys):
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._most_blocks:
            self._blocks.popitem(last=False)
        return found, begins - now_seconds


ChatChoice = Callable[[dict[str, Prefixes], Sequence[CachedReplica], Chat, str, float], str]


def chat_by_prefixes(
    known: dict[str, Prefixes], replicas: Sequence[CachedReplica], chat: Chat, key: str, now_seconds: float
) -> str:
    """`service.cluster.routing`, where each replica has all adapters on its device."""
    digests = beginnings(chat.tokens, ("", ""), chat.adapter)
    tiers: dict[str, Tier] = {} if chat.adapter is None else {chat.adapter: "device"}
    told = [
        Replica(one.name, one.queued_tokens(now_seconds), 0, tiers, known[one.name].num_tokens(digests))
        for one in replicas
    ]
    chosen = choose(chat.adapter, ROWS, len(chat.tokens) + 200, told, key=key, num_homes=len(replicas))[0]
    known[chosen].note(digests, 2**31)
    return chosen


def chat_by_load(
    _known: dict[str, Prefixes], replicas: Sequence[CachedReplica], chat: Chat, key: str, now_seconds: float
) -> str:
    """The same without a look at prompts."""
    told = [Replica(one.name, one.queued_tokens(now_seconds)) for one in replicas]
    return choose(chat.adapter, ROWS, len(chat.tokens) + 200, told, key=key)[0]


def chat_by_name(
    _known: dict[str, Prefixes], replicas: Sequence[CachedReplica], chat: Chat, _key: str, _now_seconds: float
) -> str:
    """Consistent hashing of the session, without a bound."""
    return preference(chat.name, tuple(sorted(one.name for one in replicas)))[0]


CHAT_RULES: dict[str, ChatChoice] = {
    "multilora": chat_by_prefixes,
    "multilora without prefixes": chat_by_load,
    "session (production-stack)": chat_by_name,
}


@dataclass
class ChatFigures:
    """See the module's docstring."""

    hit_rate: float
    imbalance: float
    wait_p99_seconds: float


def simulate_chats(rule: ChatChoice, given: argparse.Namespace, num_replicas: int) -> ChatFigures:
    """Divide the speed and the cache of `given.replicas` replicas between so many; all rules get the same chats."""
    chance = random.Random(given.seed)
    size = given.replicas / num_replicas
    replicas = [
        CachedReplica(f"replica-{one}", int(given.cache_tokens * size), TOKENS_PER_SECOND * size)
        for one in range(num_replicas)
    ]
    views = [{one.name: Prefixes() for one in replicas} for _ in range(given.ingresses)]
    systems = [[chance.randrange(1000) for _ in range(SYSTEM_TOKENS)] for _ in range(NUM_SYSTEMS)]
    # Of a turn in the middle, if all but its own tokens are found: own tokens, and the answer twice.
    pause = given.sessions * 600 / (given.load * given.replicas * TOKENS_PER_SECOND)
    numbers = itertools.count()
    due = [(chance.expovariate(1 / pause), next(numbers)) for _ in range(given.sessions)]
    heapq.heapify(due)
    asked = found = 0
    waits: list[float] = []
    taken: dict[str, int] = {}
    chats: dict[int, Chat] = {}
    for number in range(given.requests):
        now, key = heapq.heappop(due)
        chat = chats.pop(key, None)
        if chat is None or chat.num_turns == NUM_TURNS:
            adapter = f"{chance.randrange(4):064x}" if chance.random() < 0.5 else None
            chat = Chat(str(number), adapter, [*chance.choice(systems)])
        chat.tokens += [chance.randrange(1000) for _ in range(chance.randint(60, 300))]
        num_output = chance.randint(20, 400)
        chosen = rule(views[number % len(views)], replicas, chat, str(number), now)
        hit, wait = next(one for one in replicas if one.name == chosen).take(chat, num_output, now)
        asked, found = asked + len(chat.tokens), found + hit
        waits.append(wait)
        taken[chosen] = taken.get(chosen, 0) + 1
        chat.tokens += [chance.randrange(1000) for _ in range(num_output)]
        chat.num_turns += 1
        next_key = next(numbers)
        chats[next_key] = chat
        heapq.heappush(due, (now + chance.expovariate(1 / pause), next_key))
    imbalance = max(taken.values()) * num_replicas / given.requests
    return ChatFigures(found / asked, imbalance, sorted(waits)[int(0.99 * len(waits))])


def show_chats(given: argparse.Namespace) -> dict[str, Any]:
    """All rules, printed."""
    one = simulate_chats(chat_by_load, given, 1)
    print(f"{'rule':36}{'hit rate':>9}{'of one':>8}{'imbal.':>8}{'wait p99':>10}")
    result: dict[str, Any] = {"one replica": one.__dict__}
    for name, rule in {"one replica": chat_by_load, **CHAT_RULES}.items():
        figures = one if name == "one replica" else simulate_chats(rule, given, given.replicas)
        result[name] = figures.__dict__ | {"of_one": figures.hit_rate / one.hit_rate}
        shown = f"{figures.hit_rate:9.3f}{figures.hit_rate / one.hit_rate:8.3f}{figures.imbalance:8.2f}"
        print(f"{name:36}{shown}{figures.wait_p99_seconds:10.2f}", flush=True)
    return result


def parser() -> argparse.ArgumentParser:
    """Of the command's arguments."""
    made = argparse.ArgumentParser(
        prog="python -m bench.scale.cluster_routing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for flag, default in (("replicas", 64), ("adapters", 10_000), ("requests", 40_000), ("ingresses", 4)):
        made.add_argument(f"--{flag}", type=int, default=default)
    made.add_argument("--alpha", type=float, default=1.0, help="of Zipf's law")
    made.add_argument("--report-seconds", type=float, default=0.5, help="between two reports of a replica")
    made.add_argument("--load", type=float, default=0.7, help="part of what the replicas could compute")
    made.add_argument("--rows-for", type=int, default=64, help="adapters that a device has rows for")
    made.add_argument("--sessions", type=int, default=0, help="chats at a time; else adapters are simulated")
    made.add_argument("--cache-tokens", type=int, default=200_000, help="of a replica, for chats")
    made.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    made.add_argument("--seed", type=int, default=20_26)
    made.add_argument("--json", type=Path, metavar="FILE", help="where the figures go too")
    return made


def main() -> None:
    given = parser().parse_args()
    result = show_chats(given) if given.sessions else show_adapters(given)
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1))


def show_adapters(given: argparse.Namespace) -> dict[str, Any]:
    """The rules that were asked for, printed."""
    print(f"{'rule':36}{'hit rate':>9}{'loads':>8}{'disk':>8}{'imbal.':>8}{'moved':>8}{'wait p99':>10}{'lost':>6}")
    result = {}
    for name in given.rules:
        one = simulate(name, given)
        result[name] = one.__dict__
        moved = "-" if one.moved is None else f"{one.moved:.2f}"
        print(
            f"{name:36}{one.hit_rate:9.3f}{one.loads:8.3f}{one.disk_loads:8.3f}{one.imbalance:8.2f}{moved:>8}"
            f"{one.wait_p99_seconds:10.2f}{one.lost:6}",
            flush=True,
        )
    return result


if __name__ == "__main__":
    main()
