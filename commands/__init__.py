"""The subcommands of `bishop`. Nothing heavy is imported before a command runs."""
