"""The law on a CPU in C++: with the kernel's own gradients in the same pass, or from its log-sum-exp, or from nothing."""
