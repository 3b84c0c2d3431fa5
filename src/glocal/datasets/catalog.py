"""The public data sets: their files, checksums and loaders."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from glocal.datasets import loaders
from glocal.datasets.adult import ATTRIBUTES
from glocal.datasets.dataset import Dataset
from glocal.datasets.fetch import RemoteFile
from glocal.datasets.loaders import LocalFiles
from glocal.datasets.texts import Texts


@dataclass(frozen=True)
class Source:
    """A public data set: the files of its download, and the function that loads them.

    `repacked` is another packing that GLOCAL_DATA may hold. `attributes` names the columns of its
    groups, if it has any, and the meanings of 0 and 1.
    """

    name: str
    summary: str
    files: tuple[RemoteFile, ...]
    load: Callable[[LocalFiles], Dataset | Texts]
    repacked: tuple[RemoteFile, ...] = ()
    attributes: Mapping[str, tuple[str, str]] = field(default_factory=dict)


_MNIST_MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "http://yann.lecun.com/exdb/mnist/",
)


def _mnist_file(name: str, sha256: str, size: int) -> RemoteFile:
    return RemoteFile(name, tuple(mirror + name for mirror in _MNIST_MIRRORS), sha256, size)


_MNIST = (
    _mnist_file(
        "train-images-idx3-ubyte.gz",
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        9_912_422,
    ),
    _mnist_file(
        "train-labels-idx1-ubyte.gz",
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        28_881,
    ),
    _mnist_file(
        "t10k-images-idx3-ubyte.gz",
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        1_648_877,
    ),
    _mnist_file(
        "t10k-labels-idx1-ubyte.gz",
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        4_542,
    ),
)
_CIFAR10 = (
    RemoteFile(
        "cifar-10-binary.tar.gz",
        ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
        "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        170_052_171,
    ),
)
_CIFAR10_REPACKED = (
    RemoteFile(
        "data_batch_1.xz",
        (),
        "45054fc75004b9672f23df104883df42066aa0dcd4801397c7abaae46bba48c3",
        16_837_880,
    ),
    RemoteFile(
        "data_batch_2.xz",
        (),
        "34debafe1b93452d59ac20d79e4ddfae564e2870e4c889946ee4b34433f3b09c",
        16_892_968,
    ),
    RemoteFile(
        "data_batch_3.xz",
        (),
        "3161cca6121209e91eba379c6bd4b8bb8a93f04ca0ff032a5ea97cf2cf2d1917",
        16_894_880,
    ),
    RemoteFile(
        "data_batch_4.xz",
        (),
        "baaa4c36ba408211c40711eaaec402e4f69715aca1a6c18013f4bb94dadf17c0",
        16_871_032,
    ),
    RemoteFile(
        "data_batch_5.xz",
        (),
        "73f86e188b0bd02f4d03a6af0fbc144d9ff2bdee1e78d2eaf6d67606eb600e36",
        16_836_484,
    ),
    RemoteFile(
        "test_batch.xz",
        (),
        "a3e496156d30bb77b0069657fe3c6cc8ee592cc0a887845cf2a308fa9698dd74",
        16_873_168,
    ),
)
_ADULT = (
    RemoteFile(
        "adult.data",
        ("https://archive.ics.uci.edu/ml/machine-learning-databases/adult/adult.data",),
        "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
        3_974_305,
    ),
)
_MOOD_ESSAYS_URL = (
    "https://raw.githubusercontent.com/"
    "semeval2026task2/EmotionValArouTimeVariation2026/main/datasets/"
)
_MOOD_ESSAYS = (
    RemoteFile(
        "train_subtask1.csv",
        (f"{_MOOD_ESSAYS_URL}TRAIN_RELEASE_3SEP2025/train_subtask1.csv",),
        "e1f09b16526a3e6620a55c01550438088f364c57706b557db550aa9fde4d8634",
        569_970,
    ),
    RemoteFile(
        "test_labels_subtask1.csv",
        (f"{_MOOD_ESSAYS_URL}TEST_LABELS_RELEASE_23FEB2026/test_labels_subtask1.csv",),
        "9d4734b93112c9db07144f404e013f55abb3f847c96b3cfd2550d8340cf5be3c",
        364_649,
    ),
)
_VQAV2 = (
    RemoteFile(
        "images.zip",
        (),
        "20d0723a7469783e24da049c6f6c4776ca7340b9bbf9f0189e6b6ee6f3e7027b",
        38_098_730,
    ),
    RemoteFile(
        "vqa_annotatons_test.gzip",
        (),
        "d652e158e709fe95e5836b2b251e02e3419c97ddbf5baf8a2a85e8508bc26cb3",
        129_847,
    ),
    RemoteFile(
        "vqa_annotatons_train.gzip",
        (),
        "457435882537cedfec09672cf342831f08dde8d6baad5ad2052e96e91cfe6d98",
        2_107_079,
    ),
    RemoteFile(
        "vqa_annotatons_valid.gzip",
        (),
        "eb102dee80b553a4e706e0205c49d4ec85fe1983db317ec6154aca5b630f92c4",
        397_925,
    ),
    RemoteFile(
        "vqa_questions_test.gzip",
        (),
        "14d030b0ffadca31e61ac3a3e6b2977331b461e257105483df3202b4a164bbba",
        57_415,
    ),
    RemoteFile(
        "vqa_questions_train.gzip",
        (),
        "8145e6378c4019f7835fcb9b20a0a115930e89783f7c9aa79a60eae89db2c41d",
        915_127,
    ),
    RemoteFile(
        "vqa_questions_valid.gzip",
        (),
        "ea54fcc66ef3ece04c9f46ac83daa8e22a3f20a123e5bb75b275427f764218be",
        173_000,
    ),
)
_EASY_VQA = (
    RemoteFile(
        "test_images.npy.xz",
        (),
        "66825dc6229da8376e32f7e8e5421cf6fbaaab1af006caa15c83a1457c9cbf2f",
        165_784,
    ),
    RemoteFile(
        "test_questions.json.xz",
        (),
        "6e050aa9ef2ebbb254ec7a8bf0f60f1e15006ee4cbddd1694f2f6737b8d76664",
        33_244,
    ),
    RemoteFile(
        "train_images.npy.xz",
        (),
        "f1c984e7740b8c25865376608c2cd0d094d52cfa8efb88f64377d4d79b97a067",
        659_128,
    ),
    RemoteFile(
        "train_questions.json.xz",
        (),
        "25afc3278c698404b81eb232c5a3fb3db1721cf11069c5d734d3bf23c490fec4",
        128_992,
    ),
)

SOURCES: dict[str, Source] = {
    "digits": Source(
        "digits",
        "1,797 handwritten digits, 8x8 grey, bundled with scikit-learn",
        (),
        loaders.load_digits,
    ),
    "mnist": Source(
        "mnist",
        "70,000 handwritten digits, 28x28 grey, 10 classes (11 MB)",
        _MNIST,
        loaders.load_mnist,
    ),
    "cifar10": Source(
        "cifar10",
        "60,000 photographs, 32x32 RGB, 10 classes (170 MB)",
        _CIFAR10,
        loaders.load_cifar10,
        _CIFAR10_REPACKED,
    ),
    "adult": Source(
        "adult",
        "30,940 people of the 1994 census, 93 columns: income, beside race and sex (4 MB)",
        _ADULT,
        loaders.load_adult,
        attributes=ATTRIBUTES,
    ),
    "mood_essays": Source(
        "mood_essays",
        "4,501 short essays of 182 people with their own mood in 5 classes, SemEval-2026 (1 MB)",
        _MOOD_ESSAYS,
        loaders.load_mood_essays,
    ),
    "vqav2": Source(
        "vqav2",
        "33,183 questions about 12,606 photographs, 128x128, VQA v2; not to be downloaded (42 MB)",
        _VQAV2,
        loaders.load_vqav2,
    ),
    "easy_vqa": Source(
        "easy_vqa",
        "48,248 questions about 5,000 coloured shapes, 64x64; not to be downloaded (1 MB)",
        _EASY_VQA,
        loaders.load_easy_vqa,
    ),
}
