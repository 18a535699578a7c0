"""What the lint knows of operators and custom calls, from the error code pages and release notes of neuronx-cc."""


def _words(*lines: str) -> frozenset[str]:
    return frozenset(word for line in lines for word in line.split())


# Names on the page of EVRF015.
CUSTOM_CALLS = _words(
    "AwsNeuronErf AwsNeuronGelu AwsNeuronGeluApprxTanh AwsNeuronGeluBackward AwsNeuronSilu AwsNeuronSiluBackward",
    "AwsNeuronRmsNorm AwsNeuronSoftmax AwsNeuronSoftmaxBackward AwsNeuronCollectiveMatmul AwsNeuronIntMatmult",
    "AwsNeuronArgMax AwsNeuronArgMin AwsNeuronTopK AwsNeuronDropoutMaskV1 AwsNeuronCustomNativeKernel",
    "AwsNeuronCustomOp AwsNeuronDevicePrint AwsNeuronLNCShardingConstraint AwsNeuronTransferWithStaticRing",
    "ResizeNearest ResizeBilinear ResizeNearestGrad NeuronBoundaryMarker-Start NeuronBoundaryMarker-End",
    "AwsNeuronModuleMarkerStart-Forward AwsNeuronModuleMarkerEnd-Forward",
    "AwsNeuronModuleMarkerStart-Backward AwsNeuronModuleMarkerEnd-Backward",
)

# The last published operator list (release notes, "Supported Operators") in the words of HLO.
LISTED = _words(
    "abs add all-gather all-reduce and atan2 batch-norm-grad batch-norm-inference batch-norm-training bitcast-convert",
    "broadcast ceil clamp compare concatenate constant convert cosine custom-call divide dot dynamic-update-slice",
    "exponential floor gather get-tuple-element iota log maximum minimum multiply negate not pad parameter power",
    "reduce reshape reverse rng rng-bit-generator rsqrt scatter select select-and-scatter shift-right-logical sign",
    "sine slice sqrt subtract tanh transpose tuple",
)
REDUCERS = _words("maximum minimum add multiply")

# Absent from it, but used by AWS's own frameworks today, or refused only in special forms (error code pages).
USED_TODAY = _words(
    "all-to-all collective-permute convolution erf logistic reduce-scatter reduce-window shift-right-arithmetic sort",
    "topk while",
)

# Refused by name on an error code page; and of the same family, or a transfer to the host, but not named there.
REFUSED = _words("triangular-solve")
DOUBTFUL = _words("cholesky fft infeed outfeed send send-done recv recv-done map")
DYNAMIC = _words("set-dimension-size get-dimension-size dynamic-reshape")
