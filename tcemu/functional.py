"""Softmax, norms, activations and rotary embeddings as kernels compute them, bit for bit: the kernel is a value."""

from tcemu.operations.functional.activations import gelu as gelu
from tcemu.operations.functional.activations import gelu_mul as gelu_mul
from tcemu.operations.functional.activations import silu as silu
from tcemu.operations.functional.activations import silu_mul as silu_mul
from tcemu.operations.functional.kernel_table import KERNELS as KERNELS
from tcemu.operations.functional.kernel_table import get_kernel as get_kernel
from tcemu.operations.functional.kernel_values import GeluKernel as GeluKernel
from tcemu.operations.functional.kernel_values import LayerNormKernel as LayerNormKernel
from tcemu.operations.functional.kernel_values import RmsNormKernel as RmsNormKernel
from tcemu.operations.functional.kernel_values import RotaryKernel as RotaryKernel
from tcemu.operations.functional.kernel_values import SiluKernel as SiluKernel
from tcemu.operations.functional.kernel_values import SoftmaxKernel as SoftmaxKernel
from tcemu.operations.functional.norms import layer_norm as layer_norm
from tcemu.operations.functional.norms import rms_norm as rms_norm
from tcemu.operations.functional.rotary_embedding import rotary as rotary
from tcemu.operations.functional.row_softmax import cross_entropy as cross_entropy
from tcemu.operations.functional.row_softmax import log_softmax as log_softmax
from tcemu.operations.functional.row_softmax import softmax as softmax
from tcemu.operations.functional.row_sums import RowSum as RowSum
