"""Real sites: a server and participants on hosts of their own, each with its data and its own model, over mutual TLS.

contract: what all agreed on. half: one site's part, with its state on disk. outbox: what left a site. coordinator: the
server's part. post: orders and answers as bytes. engine: the loop's view of the sites. flare: NVIDIA FLARE, which carries
the bytes; nothing outside that folder imports it.
"""
