"""Replicas as Ray actors: the only file that knows Ray.

An actor hosts an ordinary engine. The router pulls its events, and whatever Ray reports as a
failure, a short one included, means that the replica is lost: its pictures are drawn elsewhere. Ray
restarts and repeats nothing by itself.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from engine.config import EngineConfig
from engine.policy_info import ReadSet
from engine.replicas.host import Host
from engine.replicas.replica import Facts, ReplicaLost, ReplicaRefused, Report
from engine.service_api import ReadQuery
from scheduler.request import ImageRequest, RequestError

log = logging.getLogger("bishop.replicas")

T = TypeVar("T")

OBJECT_STORE = 256 << 20
"""Bytes of shared memory a Ray started here may use: pictures on their way, and nothing else."""

ANSWER_SECONDS = 5.0
"""How long a question may take before another replica is asked."""

LOOK_SECONDS = 1.0
PATIENT_SECONDS = 15.0
"""A replica that has not begun to start by then is waiting for a machine, which is worth a line."""

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's own advice for what its next version will do; without it, every start warns.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


class _Actor:
    """The far side. Orders are taken one after the other; collecting and questions run beside."""

    def __init__(self, orphan_seconds: float) -> None:
        self._host: Host | None = None
        self._heard = time.monotonic()
        self._orphan_seconds = orphan_seconds

    def load(self, config: EngineConfig) -> Facts:
        self._host = host = Host(config)
        self._heard = time.monotonic()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        return host.facts

    def submit(self, request: ImageRequest) -> None:
        self._there.submit(request)

    def abort(self, id: str) -> None:
        self._there.abort(id)

    def collect(self, seconds: float) -> Report:
        self._heard = time.monotonic()
        return self._there.collect(seconds)

    def check(self, request: ImageRequest) -> None:
        self._there.check(request)

    def read_set(self, query: ReadQuery) -> ReadSet:
        return self._there.read_set(query)

    @property
    def _there(self) -> Host:
        assert self._host is not None, "load comes first"
        return self._host

    def _watch(self) -> None:
        """A router that was cut off has given this replica up, and may be unable to say so: end,
        and leave the machine to the next one."""
        while time.monotonic() - self._heard < self._orphan_seconds:
            time.sleep(LOOK_SECONDS)
        os._exit(1)


GROUPS = {"orders": 1, "news": 2, "questions": 2}
_IN_GROUP = {"submit": "orders", "abort": "orders", "collect": "news"}


class RayReplica:
    """See `engine.replicas.replica.Replica`. silent_seconds: how long an answer may be overdue."""

    def __init__(self, actor: Any, facts: Facts, silent_seconds: float) -> None:
        self._actor, self._facts, self._silent = actor, facts, silent_seconds
        self._orders: list[Any] = []
        self._lock = threading.Lock()

    @property
    def facts(self) -> Facts:
        return self._facts

    def submit(self, request: ImageRequest) -> None:
        self._order("submit", request)

    def abort(self, id: str) -> None:
        self._order("abort", id)

    def collect(self, seconds: float) -> Report:
        report: Report = _answer(self._call("collect", seconds), seconds + self._silent)
        self._check_orders()
        return report

    def check(self, request: ImageRequest) -> None:
        _answer(self._call("check", request), ANSWER_SECONDS)

    def read_set(self, query: ReadQuery) -> ReadSet:
        found: ReadSet = _answer(self._call("read_set", query), ANSWER_SECONDS)
        return found

    def close(self) -> None:
        try:
            ray.kill(self._actor)
        except Exception as error:
            log.warning("a replica could not be ended, it will end by itself: %s", error)

    def _order(self, method: str, argument: object) -> None:
        order = self._call(method, argument)
        with self._lock:
            self._orders.append(order)

    def _check_orders(self) -> None:
        """Raises ReplicaLost if an order did not arrive, which no report would ever tell."""
        with self._lock:
            orders, self._orders = self._orders, []
        if not orders:
            return
        done, open_ones = ray.wait(orders, num_returns=len(orders), timeout=0)
        for order in done:
            _answer(order, self._silent)
        with self._lock:
            self._orders = open_ones + self._orders

    def _call(self, method: str, argument: object) -> Any:
        group = _IN_GROUP.get(method, "questions")
        try:
            return getattr(self._actor, method).options(concurrency_group=group).remote(argument)
        except RayError as error:
            raise ReplicaLost(_line(error)) from None


class RaySpawn:
    """Makes replicas, each with its share of the cluster: a GPU for each of its ranks, or
    as many CPUs as they have threads.

    silent_seconds: how long an answer may be overdue before a replica counts as lost.
    """

    def __init__(self, config: EngineConfig, silent_seconds: float = 10.0) -> None:
        self._config, self._silent = config, silent_seconds
        gpu, ranks = config.device.type == "cuda", config.tensor_parallel_size
        self.needs = {"GPU": ranks} if gpu else {"CPU": ranks * (config.threads or 1)}
        share = {"num_gpus": ranks, "num_cpus": 0} if gpu else {"num_cpus": self.needs["CPU"]}
        self._class = ray.remote(concurrency_groups=GROUPS)(_Actor).options(
            max_restarts=0, max_task_retries=0, **share
        )

    def room(self) -> int:
        """Replicas that the cluster as it is has room for."""
        there: Mapping[str, float] = ray.cluster_resources()
        return min(int(there.get(name, 0) // count) for name, count in self.needs.items())

    def __call__(self, name: str, wanted: Callable[[], bool]) -> RayReplica | None:
        try:
            actor = self._class.remote(3 * self._silent)
            loading = actor.load.options(concurrency_group="questions").remote(self._config)
        except RayError as error:
            raise ReplicaLost(_line(error)) from None
        facts = None
        try:
            facts = self._loaded(name, loading, wanted)
        finally:
            if facts is None:
                ray.kill(actor)
        return None if facts is None else RayReplica(actor, facts, self._silent)

    def _loaded(self, name: str, loading: Any, wanted: Callable[[], bool]) -> Facts | None:
        start, told = time.monotonic(), False
        while wanted():
            done, _ = ray.wait([loading], timeout=LOOK_SECONDS)
            if done:
                return _first_answer(loading)
            if not told and time.monotonic() - start > PATIENT_SECONDS:
                told = True
                log.info("%s still starts; it needs %s of %s", name, self.needs, _free())
        return None


def _free() -> str:
    return str({k: v for k, v in ray.available_resources().items() if k in ("CPU", "GPU")})


def _first_answer(loading: Any) -> Facts:
    try:
        facts: Facts = ray.get(loading)
    except RayTaskError as error:
        cause = getattr(error, "cause", None)
        raise ReplicaRefused(_line(cause or error)) from None
    except RayError as error:
        raise ReplicaLost(_line(error)) from None
    return facts


def _answer(call: Any, seconds: float) -> Any:
    """The result of a call. Raises RequestError as the replica does, ReplicaLost for the rest."""
    try:
        return ray.get(call, timeout=seconds)
    except GetTimeoutError:
        raise ReplicaLost(f"it has not answered for {seconds:.0f} s") from None
    except RayTaskError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, RequestError):
            raise cause from None
        raise ReplicaLost(_line(cause or error)) from None
    except RayError as error:
        raise ReplicaLost(_line(error)) from None


def _line(error: BaseException) -> str:
    """What went wrong, without a stack: Ray's messages are long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def connect(address: str | None, cpus: int | None = None, store: int = OBJECT_STORE) -> None:
    """Join the Ray at `address` ("auto": the one on this machine), or start one here if None.

    cpus: of the Ray that is started here; the machine's if None. store: bytes of shared memory of
    it. Raises ReplicaRefused.
    """
    os.environ.update(QUIET)
    own: dict[str, Any] = {
        "num_cpus": cpus,
        "object_store_memory": store,
        "include_dashboard": False,
    }
    try:
        ray.init(
            address="local" if address is None else address,
            log_to_driver=False,
            logging_level=logging.WARNING,
            configure_logging=False,
            **(own if address is None else {}),
        )
    except (RayError, ConnectionError, ValueError, RuntimeError, OSError) as error:
        where = "start Ray here" if address is None else f"reach Ray at {address}"
        raise ReplicaRefused(f"cannot {where}: {_line(error)}") from None


def disconnect() -> None:
    """Leave Ray; one that was started here ends with all its replicas."""
    ray.shutdown()
