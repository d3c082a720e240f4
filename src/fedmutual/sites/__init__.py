"""Real sites: a server and participants on hosts of their own, each with its data and its own model, over mutual TLS.

contract: the configuration that all sites agreed to. site_settings: a site.toml. site_runtime: the part of one site,
with its state on disk.
sent_log: a record of all that left a site. coordinator: the part of the server. protocol: orders and answers as bytes.
engine: the sites as an engine of the round loop. flare: NVIDIA FLARE, which transports the bytes; nothing outside that
folder imports NVIDIA FLARE.
"""
