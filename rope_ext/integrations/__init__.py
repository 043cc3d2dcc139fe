"""The operator under other libraries: a file or package for each, and none is imported before it is asked for."""
