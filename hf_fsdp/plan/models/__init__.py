"""From MODEL as a person types it to a config, without weights."""
