"""One run over several ranks: a file an axis. Groups are handed down as arguments; nothing here is global."""
