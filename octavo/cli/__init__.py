"""The command `octavo`: one file per command, imported when it is asked for."""
