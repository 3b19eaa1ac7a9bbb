"""How sure a number is: paired differences, resampling, nulls, two runs compared."""
