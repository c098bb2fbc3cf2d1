"""The decision of a view: a pure function, so that all members of the same view make the same decision.

A round is agreed as in single-decree Paxos: the coordinator's views are the messages, and each reduce is a ballot. The
*voters* of a round are the members of the reduce that made it, or those that began the generation. They are the
acceptors of the next round:

- A header is a promise. A member that requests a view is in no reduce, and begins one only by the view of its newest
  request. So a member that does not hold a result now will never hold one of an older view.
- A member *holds* a result from `Reduced` until it holds a newer one. A reduce succeeds only if its whole group takes
  part, so the headers of the group in that view were the newest.
- A held result is committed in a view in which more than half of the round's voters hold it. Any two views with more
  than half of the voters share a member, whose header shows the held result. So no two members commit different results
  for a round of a generation, whatever answers are late, lost or repeated, even with a restarted coordinator. A result
  that absent members may have committed is never dropped.

That rules out differing commits. Keeping every committed round needs a second rule, because the members of a view may
continue without the others: a view continues only if no other view can have continued. Either all voters are in it, or
a *witness* is. A witness is a voter whose requests were all answered, and which saw the view with this id or the
previous id. Ids count changes of membership, so the witness was in every view since. Without either, the members wait
`turnover_seconds` for the others, or until the others are known to be dead (`Header.wait_expired`).

The members in the view begin a new *generation* in three cases: with half of the voters or fewer; with a result that
absent members may have committed and too few hold; or after a wait. Its name is derived from this view, so no other
view begins the same one. It begins with the newest result that one of the members holds.

A view without all voters is requested once more: it may lack live members that were about to send a request.

The coordinator (`membership`) also guarantees that a view has one header for each name, and none of a request that has
ended: a later one of the member may have broken its promise. A restarted coordinator begins
with an id that no member has seen, so no earlier id makes a witness.

The limit: after a wait, live members may have continued elsewhere. When both groups meet, the generation with more
rounds wins, and the others heal from it. Every generation still has one state for each round; only such a wait can lose
a round.

**Several coordinators** (`Rules.majority`). All their views have one order, and the requests of each member have it too
(`choice`). So whatever a view does, it knows all that its members have accepted before, and they accept nothing of an
earlier view after it. No witness and no wait is used. The successor of a state is one decree; its proposals are the
reduces and the new generations without a result, and each has the stamp of its view as its number:

- The voters are listed by identity (`Header.electors`). A member that heals to a state of which it is a voter votes: it
  cannot have accepted anything there. With half of them or fewer a view does nothing.
- A result is committed if more than half of the voters hold it with the same stamp. So any later view with more than
  half of them has one that holds it, or a newer acceptance of it.
- Such a view takes the held result with the newest stamp. If half of the voters or more do not hold it, it is not
  committed and never will be, as these accept no older view: a new reduce may begin. Otherwise all voters in the view
  adopt it with the view's stamp (`Adopt`), with or without its data. So no other result gets a higher stamp than one
  that may be committed. Those without data heal from those that have it.
- A new generation of the same state, for new leases, is adopted and committed in the same way.

Half of the voters or fewer begin a new generation only if the processes of all others are dead and fewer islands than
`minimum` are missing, for then no others continue. Islands that do not know the voters go on only if all islands of the
ledger are here, or more than half of them and all come from checkpoints. All this also holds if no voter is left, or
if a result is lost with its last holder. Only these cases, where half of the voters or more have lost their memory, can
lose a round (`NewGeneration.waited`)."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import fsum, log2
from statistics import median_low

from gregale.distributed.agreement import difference, from_text
from gregale.islands.protocol import outliers
from gregale.islands.protocol.ledger import LeaseReport, Ledger, advance, digest_of
from gregale.islands.protocol.messages import (
    NO_ROUND,
    AcceptedResult,
    Generation,
    Header,
    OuterRecord,
    Peer,
    Rules,
    View,
)
from gregale.islands.protocol.outliers import KEPT, Size


def distances(count: int) -> list[int]:
    """Return 1, 2, 4, ... below `count`.

    Members in a circle that pass a message on at these distances reach all of `count` members in log2(count) hops.
    """
    return [1 << bit for bit in range((count - 1).bit_length())]


def recipients(members: Sequence[str], own: str, turn: int) -> tuple[str, ...]:
    """Return the members at the `distances` from `own`, and one more, which is another one with every `turn`.

    So a member also reaches each other one directly, within as many turns as there are members.
    """
    count, place = len(members), members.index(own)
    found = {*distances(count), 1 + turn % (count - 1)} if count > 1 else ()
    return tuple(members[(place + distance) % count] for distance in sorted(found))


WHOLE = 256  # parts are integers of this sum, so that all members compute the same
FASTEST = 54  # the level of 1 Gbit/s: the processor bounds a round on faster links
TOLERANCE = 3  # levels within which links count as equal
ROOT = 2**0.5


def level(bytes_per_second: float) -> int:
    """Return a rate as a power of the root of 2, at least 1 and at most `FASTEST`."""
    return round(min(max(2 * log2(max(bytes_per_second, 1.0)), 1), FASTEST))


def parts(levels: Sequence[int]) -> tuple[int, ...]:
    """Return the part of each member by the level of its link, 0 if unknown; () if all average the same.

    An unknown level counts as the median of the others.
    """
    count, known = len(levels), sorted(min(each, FASTEST) for each in levels if each)
    if count < 3 or not known or known[-1] - known[0] <= TOLERANCE:
        return ()
    median = known[(len(known) - 1) // 2]
    rates = [rate(min(each or median, FASTEST)) for each in levels]
    fastest = sorted(rates, reverse=True)
    # T if the n fastest average something, for the largest n for which the slowest of them does.
    times = [(count - 2 + n) / fsum(fastest[:n]) for n in range(1, count + 1)]
    time = next(time for time, slowest in reversed(list(zip(times, fastest, strict=True))) if time * slowest > 1)
    shares = [WHOLE * max(0.0, time * each - 1) / (count - 2) for each in rates]
    found = [int(share) for share in shares]
    order = sorted(range(count), key=lambda rank: (found[rank] - shares[rank], rank))
    for rank in order[: WHOLE - sum(found)]:
        found[rank] += 1
    return tuple(found)


def rate(number: int) -> float:
    """Return the bytes a second of a level, the same bits everywhere."""
    return 2.0 ** (number // 2) * (ROOT if number % 2 else 1.0)


@dataclass(frozen=True)
class StartFleet:
    """The fleet begins from the common seed; its members get first leases of the data, by `reports`."""

    generation: Generation
    voters: int
    reports: tuple[LeaseReport, ...]


@dataclass(frozen=True)
class CommitAccepted:
    """All members that hold the result `key` with this digest commit it; the others heal."""

    key: str
    digest: str


@dataclass(frozen=True)
class NewGeneration:
    """`members` begin a new generation, for this `reason`, with the held result `commit` or the same state.

    Then they get new leases of the data, by `reports`; a fleet whose members had all left has returned its data.
    """

    generation: Generation
    members: tuple[Peer, ...]
    commit: CommitAccepted | None
    waited: bool
    reason: str
    reports: tuple[LeaseReport, ...]

    @property
    def identities(self) -> frozenset[str]:
        return frozenset(peer.identity for peer in self.members)


@dataclass(frozen=True)
class Adopt:
    """All voters hold `result`, with or without its data. `renewal`: it is this new generation of the same state."""

    result: AcceptedResult
    renewal: NewGeneration | None = None


@dataclass(frozen=True)
class FormGroup:
    """A group reduces the next round; its commit brings the next ledger, by `reports`.

    `left_out`: why messages contribute nothing, by name; `size`: the median of the other messages; `parts`: as of
    `messages.Reduce`.
    """

    key: str
    ballot: int
    members: tuple[Peer, ...]
    weights: tuple[float, ...]
    electors: tuple[str, ...]
    voters: int
    leaving: frozenset[str]
    reports: tuple[LeaseReport, ...]
    size: Size | None = None
    stamp: int = 0  # of the view
    left_out: dict[str, str] = field(default_factory=dict)
    parts: tuple[int, ...] = ()

    def ledger_after(self, outer: OuterRecord, rules: Rules) -> Ledger:
        """Return the ledger after this round; it may be the first of a stage, of which no example is used yet."""
        ledger, reports = outer.ledger, self.reports
        if rules.stage_at(outer.round + 1) != rules.stage_at(outer.round):
            ledger, reports = ledger.next_stage(), tuple(report._replace(used=0) for report in reports)
        return advance(ledger, reports, rules.lease_policy)

    def sizes_after(self, sizes: tuple[Size, ...]) -> tuple[Size, ...]:
        return (*sizes, self.size)[-KEPT:] if self.size else sizes

    @property
    def identities(self) -> tuple[str, ...]:
        return tuple(peer.identity for peer in self.members)

    @property
    def ranks(self) -> dict[str, int]:
        return {identity: rank for rank, identity in enumerate(self.identities)}


@dataclass(frozen=True)
class Wait:
    """Do nothing, for this `reason`."""

    reason: str
    names: tuple[str, ...] = ()  # the names of the missing islands, as far as the view has them
    lacking: bool = False  # voters are missing, perhaps only late
    missing: bool = False  # too many voters are missing to continue
    idle: bool = False  # no island wants a round


Plan = StartFleet | CommitAccepted | NewGeneration | Adopt | FormGroup | Wait


@dataclass(frozen=True)
class Decision:
    plan: Plan  # for the members in `current`
    refused: dict[str, str]  # reasons by identity
    top: Header | None = None  # a header with the newest state; None: no member has a state
    current: frozenset[str] = frozenset()  # identities
    sources: tuple[Peer, ...] = ()  # the members that have that state
    differ: frozenset[str] = frozenset()  # identities that have another state for the same round
    electors: tuple[str, ...] = ()  # `Header.electors` of that state
    headers: dict[str, Header] = field(default_factory=dict)  # of the view, by identity

    @property
    def fastest(self) -> float:
        """The shortest step that a member reports, in seconds; 0 if none does."""
        return min((each.step_seconds for each in self.headers.values() if each.step_seconds), default=0.0)

    @property
    def copying(self) -> float:
        """The usual seconds from a handover until a message is on the host, of members that are waited for.

        It is their lower median; 0 if none has one.
        """
        return median_low([each.copy_seconds for each in self.headers.values() if each.copy_seconds] or [0.0])

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(header.hosts[0] for header in self.headers.values() if header.hosts)

    def missing(self, group: tuple[Peer, ...]) -> tuple[Peer, ...]:
        return tuple(peer for peer in group if peer.identity not in self.headers)


EXCLUDE_AFTER = 2  # failed reduces of a round after which members that do not reach each other are excluded
SPLIT_AFTER = 4  # failed reduces of a round after which half of the voters or fewer continue without the others


def decide(view: View, rules: Rules) -> Decision:
    return replace(_decide(view, rules), headers={header.identity: header for header in view.headers})


def _decide(view: View, rules: Rules) -> Decision:
    headers, refused = _admitted(view.headers)
    states = [header for header in headers if header.round > NO_ROUND]
    if not states:
        return _start(view, headers, refused, rules)
    recorded = {header.recorded for header in headers if header.recorded}  # one at most
    final = [header for header in states if header.digest in recorded]
    newest = max((header.round, header.generation) for header in final or states)
    at_top = [header for header in states if (header.round, header.generation) >= newest]
    digest = _most_common(header.digest for header in final or at_top)
    current = [each for each in at_top if (each.round, each.generation, each.digest) == (*newest, digest)]
    electors = next((header.electors for header in current if header.electors), ())
    if rules.majority:
        current = [replace(header, voter=header.identity in electors) for header in current]
    return _of_state(_plan(view, headers, current, rules), refused, current, at_top, electors)


def _of_state(
    plan: Plan, refused: dict[str, str], current: list[Header], at_top: list[Header], electors: tuple[str, ...] = ()
) -> Decision:
    """Return the decision of the members with a state, of which others `at_top` have another one."""
    identities = frozenset(header.identity for header in current)
    differ = frozenset(header.identity for header in at_top if header.digest != current[0].digest)
    return Decision(plan, refused, current[0], identities, tuple(map(_peer, current)), differ, electors)


def _most_common(values: Iterable[str]) -> str:
    counts = Counter(values)
    return min(counts, key=lambda value: (-counts[value], value))


def _peer(header: Header) -> Peer:
    return Peer(header.name, header.session, header.hosts)


def _admitted(headers: Sequence[Header]) -> tuple[list[Header], dict[str, str]]:
    """Return the members that agree with most members that have a state, and the reasons against the others."""
    if not headers:
        return [], {}
    states = [header for header in headers if header.round > NO_ROUND] or headers
    counts = Counter((each.agreement, each.version) for each in states)
    rounds = {pair: max(h.round for h in states if (h.agreement, h.version) == pair) for pair in counts}
    agreement, version = min(counts, key=lambda pair: (-counts[pair], -rounds[pair], pair))
    admitted, refused = [], {}
    for header in sorted(headers, key=lambda h: (h.name, -h.round, h.session)):
        if header.version != version:
            refused[header.identity] = f"the fleet runs Gregale {version} and this island {header.version}"
        elif header.agreement != agreement:
            fleet = next(each for each in states if (each.agreement, each.version) == (agreement, version))
            both = {"the fleet": from_text(fleet.agreement), "this island": from_text(header.agreement)}
            refused[header.identity] = difference(both)
        else:
            admitted.append(header)
    return admitted, refused


def fingerprint(view: View) -> str:
    """Return a name that no other view has, because every request has another number."""
    return digest_of(view.id, sorted((header.name, header.session, header.asked) for header in view.headers))


def _start(view: View, headers: list[Header], refused: dict[str, str], rules: Rules) -> Decision:
    if len(headers) < (needed := max(rules.minimum, rules.start)):
        return Decision(_too_few(headers, needed), refused)
    if healing := _names(header for header in headers if header.healing):
        return Decision(Wait("islands fetch a state", healing), refused)
    digest = _most_common(header.digest for header in headers)
    right = [header for header in headers if header.digest == digest]
    plan = StartFleet(Generation(1, fingerprint(view)), len(right), tuple(map(_report, right)))
    return _of_state(plan, refused, right, headers)


def _report(header: Header, leaving: bool = False) -> LeaseReport:
    return LeaseReport(header.name, header.holder, header.used, leaving, header.batch)


def _too_few(headers: Sequence[Header], needed: int) -> Wait:
    return Wait(f"{len(headers)} of at least {needed} islands are here", _names(headers))


def _names(headers: Iterable[Header]) -> tuple[str, ...]:
    return tuple(sorted(header.name for header in headers))


def _plan(view: View, headers: list[Header], current: list[Header], rules: Rules) -> Plan:
    if current[0].round >= rules.rounds:
        return Wait("the run is complete", _names(header for header in headers if header not in current))
    # Islands restored from checkpoints wait like a new fleet: the first to come may have an older state.
    is_running = any(header.round > NO_ROUND and not header.from_checkpoint for header in headers)
    needed = rules.minimum if is_running else max(rules.minimum, rules.start)
    if len(headers) < needed:
        return _too_few(headers, needed)
    voters, present = current[0].voters, sum(header.voter for header in current)
    if present < voters and not all(header.retried for header in current if header.voter):
        return Wait("live members may be late: requesting another view", lacking=True)
    plan = _by_majority(view, headers, current, rules) if rules.majority else _by_witness(view, current)
    if plan is not None:
        return plan
    if awaited := _names(header for header in headers if header.hold_rounds):
        return Wait("islands heal more slowly than rounds are made", awaited)
    waits = rules.lockstep or current[0].round >= rules.closing
    if waits and (early := _names(header for header in current if not header.ready)):
        return Wait("islands have not made their steps", early)
    return _form(view, headers, current, rules)


def _by_witness(view: View, current: list[Header]) -> Plan | None:
    """Return the plan that has to come before a reduce, if any."""
    best = _newest_held(current)
    voters, present = current[0].voters, sum(header.voter for header in current)
    sure = 2 * present > voters and (present == voters or _witnessed(current, view))
    verdict = _verdict(current, best) if sure else "turn"
    if verdict == "commit" and best:
        return CommitAccepted(best.key, best.digest)
    return _new_generation(view, current, best) if verdict == "turn" else None


def _by_majority(view: View, headers: list[Header], current: list[Header], rules: Rules) -> Plan | None:
    """Return the plan that has to come before a reduce where there are several coordinators, if any."""
    voters, present = current[0].voters, [header for header in current if header.voter]
    best = max((header.held for header in present if header.held), key=lambda held: held.stamp, default=None)
    if 2 * len(present) <= voters:
        return _survivors(view, headers, current, rules)
    if best is None:
        return None
    if not any(_has_data(header, best) for header in current):
        return _survivors(view, headers, current, rules)
    if 2 * sum(header.held == best for header in present) > voters:
        return CommitAccepted(best.key, best.digest)
    if 2 * sum(not _holds(header, best) for header in present) >= voters:
        return None  # more than half of the voters cannot hold it
    return Adopt(replace(best, stamp=view.stamp))


def _survivors(view: View, headers: list[Header], current: list[Header], rules: Rules) -> NewGeneration | Wait:
    """Return how half of the voters or fewer continue: only if nobody else can."""
    # A new generation that is held (ballot 0) has no round in it, and the dead have not continued without these.
    held = [each.held for each in current if each.held and each.held.ballot]
    best = max(held, key=lambda held: held.stamp, default=None)
    identities, names = {header.identity for header in current}, {header.name for header in headers}
    voters = {identity for header in current for identity in header.electors}
    electors = voters - identities
    dead = {identity for header in current for identity in header.dead}
    # A name belongs to one process: one that has started again is not the voter.
    here = {header.identity for header in headers}
    dead |= {each for each in electors - here if each.rpartition("/")[0] in names}
    others = {name for header in current for name in header.known} - names
    if voters:
        is_alone = electors <= dead
    else:  # nobody here knows them: each has a lease, so that they are here, or their processes have ended
        # A name that is here again has no other process, so that most of them here leave no majority elsewhere.
        is_restart = all(header.from_checkpoint for header in current)
        known = {name for header in current for name in header.known}
        is_alone = not others or (is_restart and 2 * len(known & names) > len(known))
        is_alone = is_alone and any(header.wait_expired for header in current)
    holders = [each for each in current if best is None or _has_data(each, best)]
    if not holders:  # it is lost with the dead
        best, holders = None, current
    members = [each for each in holders if each.voter] or holders
    if not (is_alone and len(others) < rules.minimum):
        absent = (identity.rpartition("/")[0] for identity in electors - dead)
        missing = tuple(sorted(absent)) or tuple(sorted(others))
        return Wait("more than half of the islands that made the last round have to be here", missing, missing=True)
    return _generation(view, current, members, best, True, "the islands that made the last round are dead")


def _generation(
    view: View, current: list[Header], members: list[Header], best: AcceptedResult | None, waited: bool, reason: str
) -> NewGeneration:
    return NewGeneration(
        generation=Generation(current[0].generation.number + 1, fingerprint(view)),
        members=tuple(_peer(header) for header in members),
        commit=CommitAccepted(best.key, best.digest) if best else None,
        waited=waited,
        reason=reason,
        reports=tuple(_report(each) for each in members),
    )


def _newest_held(current: list[Header]) -> AcceptedResult | None:
    """Return the held result of the newest ballot; of two that differ, the one with more holders."""
    held = [header.held for header in current if header.held]
    counts = Counter((each.key, each.digest) for each in held)
    return min(held, key=lambda h: (-h.ballot, h.key, -counts[h.key, h.digest], h.digest), default=None)


def _holds(header: Header, best: AcceptedResult) -> bool:
    return header.held is not None and (header.held.key, header.held.digest) == (best.key, best.digest)


def _has_data(header: Header, best: AcceptedResult) -> bool:
    return header.prepared and _holds(header, best)


def _verdict(current: list[Header], best: AcceptedResult | None) -> str:
    """Return "commit", "turn" (a new generation is needed) or "form" (no held result may have been committed)."""
    voters = current[0].voters
    present = [header for header in current if header.voter]
    if best is None:
        return "form"
    present_identities = {header.identity for header in current}
    absent = any(member not in present_identities for member in best.members)
    absent_voters = sum(elector not in present_identities for elector in best.electors)
    holders = sum(_holds(header, best) for header in present)
    # A present voter that does not hold the result must witness that nobody committed it. So the result is reduced
    # again with it, unless absent voters may have committed it. A voter that keeps failing is no witness.
    others = any(not _holds(header, best) and header.failures < EXCLUDE_AFTER for header in present)
    overtaken = any(header.ballot > best.ballot for header in current)
    if 2 * holders > voters and not overtaken and (absent or not others):
        return "commit"
    if absent and 2 * (holders + absent_voters) > voters:
        return "turn"
    return "form"


def _witnessed(current: list[Header], view: View) -> bool:
    """Return whether a voter was in all views since one that it saw, so that no others continued without it."""
    return any(h.voter and h.failures < EXCLUDE_AFTER and h.seen > 0 and view.id - h.seen in (0, 1) for h in current)


def _new_generation(view: View, current: list[Header], best: AcceptedResult | None) -> NewGeneration | Wait:
    holders = [header for header in current if best is None or _holds(header, best)]
    voters = [header for header in holders if header.voter]
    witness = bool(voters) and _witnessed(current, view)
    if not witness and not any(header.wait_expired for header in current):
        return Wait("the islands that made the last round are missing", missing=True)
    holders = voters if witness else holders  # a view of all voters with the old state shows that no generation began
    reason = "half of the islands or more are gone" if witness else "the missing islands did not return in time"
    return _generation(view, current, holders, best, not witness, reason)


def _form(view: View, headers: list[Header], current: list[Header], rules: Rules) -> Plan:
    ballot = 1 + max(max(h.ballot, h.held.ballot if h.held else 0) for h in current)
    group = sorted(_reaching(current, ballot, rules), key=lambda header: header.name)
    if 2 * sum(header.voter for header in group) <= current[0].voters:
        return _split_generation(view, current, group, "islands do not reach one another")
    messages = {h.name: _size(h) for h in group if h.ready and (h.weight > 0 or h.norm is None)}
    left_out = outliers.left_out(messages, current[0].usual, rules.outlier)
    counted = {name: size for name, size in messages.items() if size and name not in left_out}
    weights = tuple(header.weight if header.name in counted else 0.0 for header in group)
    if not any(weights):
        if all(header.starved for header in group):
            renewal = _split_generation(view, current, group, "no island has data left to train on")
            if not rules.majority:
                return renewal
            members = tuple(peer.identity for peer in renewal.members)  # they have to hold it before they begin it
            return Adopt(AcceptedResult(renewal.generation.name, 0, "", members, members, view.stamp), renewal)
        return Wait("no island contributes a message", _names(group), idle=True)
    inside, stage = {header.identity for header in group}, rules.stage_at(current[0].round)
    return FormGroup(
        key=digest_of(current[0].generation, current[0].round, ballot, fingerprint(view)),
        ballot=ballot,
        members=tuple(_peer(header) for header in group),
        weights=weights,
        electors=tuple(header.identity for header in group if header.voter),
        voters=sum(not header.leaving for header in group),
        reports=tuple(
            # A member that is behind may count the examples of an earlier stage.
            _report(h if rules.stage_at(h.round) == stage else replace(h, used=0), h.leaving and h.identity in inside)
            for h in headers
        ),
        leaving=frozenset(header.identity for header in group if header.leaving),
        size=outliers.median(counted.values()),
        stamp=view.stamp,
        left_out=left_out,
        parts=parts([header.link for header in group]),
    )


def _size(header: Header) -> outliers.Size | None:
    return None if header.norm is None else outliers.Size(float(header.norm), float(header.weight))


def _split_generation(view: View, current: list[Header], members: Iterable[Header], reason: str) -> NewGeneration:
    """Return a new generation of the voters among `members`, with the same state and new leases.

    No voter has begun a reduce by an older view, and none of these begins one by this view: so no result is lost.
    """
    voters = [header for header in members if header.voter]
    renewal = _generation(view, current, voters, None, False, reason)
    return replace(renewal, reports=tuple(_report(each) for each in current))


def _reaching(current: list[Header], ballot: int, rules: Rules) -> list[Header]:
    """Return the members without those that do not reach others, once reduces keep failing; at least `minimum`.

    The result has more than half of the voters, or all members; after more failures also fewer voters, at least one. If
    no failure names a member, members are excluded in turn: one, then two, and so on.
    """
    group, failures, minimum = list(current), max(header.failures for header in current), rules.minimum
    failing = {header.name for header in current if header.failures >= EXCLUDE_AFTER}
    pairs = {(h.name, name) for h in current for name in h.unreachable if h.name in failing}
    while len(group) > minimum:
        names = {header.name for header in group}
        pairs = {pair for pair in pairs if names.issuperset(pair)}
        last = [header.name for header in group if header.voter]
        blame = Counter(name for pair in pairs for name in pair if name in failing and [name] != last)
        if not blame:
            break
        worst = min(blame, key=lambda name: (-blame[name], name))
        group = [header for header in group if header.name != worst]
    if len(group) == len(current) and failures >= SPLIT_AFTER:
        group = _without_some(current, (failures - SPLIT_AFTER) // len(current), ballot, minimum)
    voters = sum(header.voter for header in group)
    may_split = voters and failures >= SPLIT_AFTER and not rules.majority
    return group if 2 * voters > current[0].voters or may_split else list(current)


def _without_some(current: list[Header], more: int, ballot: int, minimum: int) -> list[Header]:
    count = len(current)
    out = {(ballot + index) % count for index in range(min(1 + more, count - max(minimum, 1)))}
    ordered = sorted(current, key=lambda header: header.name)
    return [header for index, header in enumerate(ordered) if index not in out]
