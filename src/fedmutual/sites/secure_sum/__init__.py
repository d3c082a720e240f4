"""Secure sums: the server learns the sum of the sites' updates and no single update.

The protocol is pairwise masking with recovery from dropouts: Bonawitz et al., Practical Secure Aggregation for
Privacy-Preserving Machine Learning, 2017, https://doi.org/10.1145/3133956.3133982, in the variant against a server that does
not follow the protocol.

fixed_point: an update as integers. shares: secret sharing among sites. masks: the masks of an update. identity: signatures
with the keys of the kits. messages: the content of orders and answers. site, server: the two sides of the protocol, whose
state is in the journals of the parties.
"""
