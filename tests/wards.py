"""A small federation of real sites, and the same as one configuration in one process."""

import tomli_w

CLASSES = [str(k) for k in range(10)]
COMMON = {
    "name": "wards",
    "rounds": 3,
    "data": {"classes": CLASSES, "mean": [0.3], "std": [0.4]},
    "split": {"preset": "v1", "test": 0.3},
    "algorithm": {"name": "fml", "alpha": 0.4, "beta": 0.6},
    "model": {"shared": "mlp"},
    "training": {"local_epochs": 1, "batch_size": 32},
    "optimizer": {"lr": 0.05},
}
SITES = {
    "north": {"model": {"personal": "mlp"}, "algorithm": {"alpha": 0.7}, "data": {"name": "digits"}},
    "south": {"model": {"personal": "cnn1"}, "data": {"name": "digits"}, "training": {"batch_size": 16}},
    "west": {"model": {"personal": "cnn2"}, "data": {"name": "digits"}, "optimizer": {"lr": 0.02}},
}


def contract(folder, common=COMMON, sites=SITES, **given):
    """FEDERATION.toml in a folder -> its path."""
    path = folder / "federation.toml"
    table = {"names": list(sites), "input": [1, 8, 8], **given}
    path.write_text(tomli_w.dumps({**common, "sites": table}))
    return path


def site(folder, name, own=None, **given):
    """A site's own site.toml, in a folder of its own -> its path."""
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    path = place / "site.toml"
    tables = {"site": name, "state": {"folder": "state"}, "engine": {"device": "cpu"}, **(own or SITES[name]), **given}
    path.write_text(tomli_w.dumps(tables))
    return path


def together(common=COMMON, sites=SITES):
    """All of it as one experiment."""
    return {**common, "clients": sites, "engine": {"name": "inprocess", "device": "cpu"}}
