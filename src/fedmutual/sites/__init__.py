"""Real sites: a server and participants on hosts of their own, each with its data and its own model, over mutual TLS.

contract: the configuration that all sites agreed to. site_settings: a site.toml. site_runtime: the part of one site.
coordinator: the part of the server. journal: the state of a party on disk. ledger: a record of all that left a site.
protocol: orders and answers as bytes. engine: the sites as an engine of the round loop. flare: NVIDIA FLARE, which carries
the bytes; nothing outside that folder imports NVIDIA FLARE.
"""
