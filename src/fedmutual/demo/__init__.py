"""The two experiments of `fedmutual demo`, and a network of one's own as they name it."""
