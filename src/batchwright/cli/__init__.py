"""The toolkit of commands: flags, tables and other output, live views, and how a long-running command stops."""
