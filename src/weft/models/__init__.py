"""Models that examples, benchmarks and studies share: a small Llama in torch, and the training
steps of Llama, mixture of experts and DLRM as kernels and collectives for the simulator."""
