"""Building blocks of networks."""

from maze.perception.blocks.base import PerceptionBlock
from maze.perception.blocks.feed_forward.dense import DenseBlock
from maze.perception.blocks.feed_forward.graph_attention import GraphAttentionBlock
from maze.perception.blocks.feed_forward.graph_conv import GraphConvBlock
from maze.perception.blocks.feed_forward.multi_head_attention import MultiHeadAttentionBlock
from maze.perception.blocks.feed_forward.point_net import PointNetFeatureBlock
from maze.perception.blocks.feed_forward.strided_conv import StridedConvolutionBlock
from maze.perception.blocks.feed_forward.vgg_conv import VGGConvolutionBlock
from maze.perception.blocks.general.action_masking import ActionMaskingBlock
from maze.perception.blocks.general.concat import ConcatenationBlock
from maze.perception.blocks.general.correlation import CorrelationBlock
from maze.perception.blocks.general.flatten import FlattenBlock
from maze.perception.blocks.general.functional import FunctionalBlock
from maze.perception.blocks.general.gap import GlobalAveragePoolingBlock
from maze.perception.blocks.general.input_conversion import (
    CategoryEncodingBlock,
    RunningNormalizationBlock,
    ScalingBlock,
)
from maze.perception.blocks.general.masked_global_pooling import MaskedGlobalPoolingBlock
from maze.perception.blocks.general.multi_index_slicing import MultiIndexSlicingBlock
from maze.perception.blocks.general.repeat_to_match import RepeatToMatchBlock
from maze.perception.blocks.general.self_attention_conv import SelfAttentionConvBlock
from maze.perception.blocks.general.self_attention_seq import SelfAttentionSeqBlock
from maze.perception.blocks.general.slice import SliceBlock
from maze.perception.blocks.general.torch_model_block import TorchModelBlock
from maze.perception.blocks.inference import InferenceBlock, InferenceGraph
from maze.perception.blocks.joint_blocks.flatten_dense import FlattenDenseBlock
from maze.perception.blocks.joint_blocks.lstm_last_step import LSTMLastStepBlock
from maze.perception.blocks.joint_blocks.set_blocks import ItemScoresBlock, SetAttentionBlock
from maze.perception.blocks.joint_blocks.strided_conv_dense import ImageDenseBlock, StridedConvolutionDenseBlock
from maze.perception.blocks.joint_blocks.vgg_conv_dense import VGGConvolutionDenseBlock
from maze.perception.blocks.joint_blocks.vgg_conv_gap import VGGConvolutionGAPBlock
from maze.perception.blocks.output.linear import GaussianOutputBlock, LinearOutputBlock
from maze.perception.blocks.recurrent.lstm import LSTMBlock
from maze.perception.blocks.recurrent.recurrent_cell import RecurrentCellBlock
from maze.perception.blocks.shape_normalization import ShapeNormalizationBlock

__all__ = [
    "ActionMaskingBlock",
    "CategoryEncodingBlock",
    "ConcatenationBlock",
    "CorrelationBlock",
    "DenseBlock",
    "FlattenBlock",
    "FlattenDenseBlock",
    "FunctionalBlock",
    "GaussianOutputBlock",
    "GlobalAveragePoolingBlock",
    "GraphAttentionBlock",
    "GraphConvBlock",
    "ImageDenseBlock",
    "InferenceBlock",
    "InferenceGraph",
    "ItemScoresBlock",
    "LSTMBlock",
    "LSTMLastStepBlock",
    "LinearOutputBlock",
    "MaskedGlobalPoolingBlock",
    "MultiHeadAttentionBlock",
    "MultiIndexSlicingBlock",
    "PerceptionBlock",
    "PointNetFeatureBlock",
    "RecurrentCellBlock",
    "RepeatToMatchBlock",
    "RunningNormalizationBlock",
    "ScalingBlock",
    "SelfAttentionConvBlock",
    "SelfAttentionSeqBlock",
    "SetAttentionBlock",
    "ShapeNormalizationBlock",
    "SliceBlock",
    "StridedConvolutionBlock",
    "StridedConvolutionDenseBlock",
    "TorchModelBlock",
    "VGGConvolutionBlock",
    "VGGConvolutionDenseBlock",
    "VGGConvolutionGAPBlock",
]
