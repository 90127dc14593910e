"""The engine-free half: frames, identity, ledger, tree rows, ring. Imports the standard library and torch only."""
