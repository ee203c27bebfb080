"""Parts of all commands: the app, options, files, and progress on stderr."""
