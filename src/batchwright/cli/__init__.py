"""What commands are made of: flags, how things look, live views, and how a long-running command stops."""
