"""State machines that decide: `(state, event, now) -> decision`.

Here live the rules that need no await, so they can be tested exhaustively and read in one sitting.
No await, clock, I/O or telemetry enters, randomness is handed in, and nothing above is imported.
"""
