"""Where the work runs. Engines know no algorithm, algorithms know no engine."""
