"""Properties that every engine must have on any package, whatever the weights; one module a kind."""
