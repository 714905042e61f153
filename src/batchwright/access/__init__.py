"""Access control: keys, scopes and the gate."""
