"""Who may do what: keys, scopes and the gate."""
