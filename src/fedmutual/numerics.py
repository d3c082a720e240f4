"""The version of the training numerics: results of one version are comparable."""

VERSION = 2
"""Raised by one when the same configuration and seed train to other bits (CPU, float32, one thread); never for a release.

Results and run folders of `fedmutual reproduce` are known by their fingerprint and this number, so a new version of the
package that trains to the same bits trains nothing anew. tests/test_numerics.py holds golden bits of one short run a method
and fails where this number should have been raised.
"""
