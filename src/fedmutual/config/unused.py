"""Keys that the algorithm or engine of a run does not use. They give a remark and no error: methods may share a file."""

from collections.abc import Iterator, Sequence

from fedmutual.config import Config, has_aggregation
from fedmutual.config.keys import list_effects
from fedmutual.config.privacy import list_ineffective_keys
from fedmutual.config.schema import ClientConfig, EngineConfig, ModelConfig, ServerConfig, TrainingConfig
from fedmutual.errors import format_count

_OWN = ("model", "training", "optimizer")


def describe_unused_keys(config: Config, scores: Sequence[str], pooled: bool) -> Iterator[str]:
    """Return one sentence for each reason why set keys have no effect.

    scores: the scored models of the algorithm, as `Algorithm.scores`. pooled: whether one network learns from all data.
    """
    name = config.algorithm["name"]
    for why, keys in _find_unused_keys(config, scores, pooled):
        shown = ", ".join(repr(k) for k in keys[:3]) + (
            f" and {format_count(len(keys) - 3, 'more key')}" if len(keys) > 3 else ""
        )
        if keys:
            yield f"{why.format(name=name)}, so {shown} {'has' if len(keys) == 1 else 'have'} no effect"


def describe_unused_engine_keys(config: Config, engine: str) -> Iterator[str]:
    """Return one sentence for each reason why the engine does not use set keys."""
    plain, engine_config = EngineConfig(), config.engine
    keys = [
        f"engine.{k}"
        for k, effect in list_effects(EngineConfig).items()
        if effect.engines and engine not in effect.engines and getattr(engine_config, k) != getattr(plain, k)
    ]
    if engine_config.name == "auto" and "engine.workers" in keys:  # it was looked at, to choose the engine
        keys.remove("engine.workers")
    if engine == "processes" and config.data.workers:
        keys.append("data.workers")  # a worker process may have none of its own
    for key in keys:
        yield f"engine {engine!r} does the work, so {key!r} has no effect"


def _find_unused_keys(config: Config, scores: Sequence[str], pooled: bool) -> Iterator[tuple[str, list[str]]]:
    """Yield (reason, keys without effect)."""
    model = config.model
    yield "privacy.nets is 'none'", list_ineffective_keys(config.privacy)
    if pooled:
        personal_key = ["model.personal"] if model.personal is not None else []
        personal_key += ["records.ensemble"] if config.records.ensemble else []
        part = ["engine.participation"] if config.engine.participation < 1 else []
        part += _list_server_keys(config)
        part += ["privacy.nets"] if config.privacy.nets != "none" else []
        yield "algorithm {name!r} trains one network on all data", [*personal_key, *part, *_list_client_keys(config, _OWN)]
        return
    if "global" not in scores and config.privacy.nets == "meme":  # else it is refused
        yield "algorithm {name!r} sends nothing", ["privacy.nets"]
    if "personal" not in scores:
        personal = ["model.personal"] if model.personal is not None else []
        personal += ["records.ensemble"] if config.records.ensemble else []
        yield "algorithm {name!r} trains no personal networks", [*personal, *_list_client_keys(config, ("model",))]
    if "global" not in scores:
        reasons = {
            "model.part": model.part is not None and "proxy" not in scores,
            "model.batchnorm": model.batchnorm != ModelConfig().batchnorm and "proxy" not in scores,
            "records.copies": config.records.copies,
            "records.ensemble": config.records.ensemble,
        }
        yield "algorithm {name!r} shares no model", [k for k, is_set in reasons.items() if is_set]
    rule = config.server.aggregate
    if not has_aggregation(config):
        yield "algorithm {name!r} makes no mean of what clients send", _list_server_keys(config)
    elif rule != ServerConfig().aggregate and "weighting" in config.algorithm:
        yield f"server.aggregate = {rule!r} takes all clients alike", ["algorithm.weighting"]
    if config.training.local_steps is not None and config.training.local_epochs != TrainingConfig().local_epochs:
        yield "algorithm {name!r} counts a round in training.local_steps", ["training.local_epochs"]


def _list_server_keys(config: Config) -> list[str]:
    """Return the set keys of [server] that say how replies are combined."""
    plain = ServerConfig()
    return [f"server.{k}" for k in ("aggregate", "sum") if getattr(config.server, k) != getattr(plain, k)]


def _list_client_keys(config: Config, tables: Sequence[str]) -> list[str]:
    """Return the keys of these tables that clients set, without `shuffled`, which always has an effect."""
    plain = ClientConfig()
    return [
        f"clients.{i}.{table}.{key}"
        for i, client_config in config.clients.items()
        for table in tables
        for key, value in getattr(client_config, table)
        if key != "shuffled" and value != getattr(getattr(plain, table), key)
    ]
