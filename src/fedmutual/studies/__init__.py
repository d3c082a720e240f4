"""What a user does with experiments: run one, compare methods, sweep settings, adapt a model to a newcomer, predict."""
