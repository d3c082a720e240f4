"""A sum of updates that the server cannot open: pairwise masks with recovery from dropouts.

Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning, 2017,
https://doi.org/10.1145/3133956.3133982; the variant against a server that does not follow the protocol.

shares: secrets split among sites. masks: what is added to an update. identity: signatures by the kits' keys. letters: what
is sent. site, server: the two parts, which know no network and no disk.
"""
