"""The papers behind the methods in BibTeX: `bibtex("fcsg")` returns what to cite.

The entries come from the papers' first pages and bibliographies; some lack a DOI.
"""

from __future__ import annotations

from nestfed.core import METHODS, NestfedError, unknown
from nestfed.problems import OBJECTIVES

WU_2023_FCSG = """@inproceedings{wu2023fcso,
  title     = {Federated Conditional Stochastic Optimization},
  author    = {Wu, Xidong and Sun, Jianhui and Hu, Zhengmian and Li, Junyi and Zhang, Aidong and Huang, Heng},
  booktitle = {Advances in Neural Information Processing Systems},
  volume    = {36},
  year      = {2023}
}"""

GAO_2022 = """@inproceedings{gao2022local,
  title     = {On the Convergence of Local Stochastic Compositional Gradient Descent with Momentum},
  author    = {Gao, Hongchang and Li, Junyi and Huang, Heng},
  booktitle = {International Conference on Machine Learning},
  pages     = {7017--7035},
  publisher = {PMLR},
  year      = {2022}
}"""

FMGDA_2022 = """@misc{fmgda2022,
  title  = {On the Convergence of Federated Deep {AUC} Maximization},
  author = {{Anonymous authors}},
  note   = {Withdrawn submission to ICLR 2023; the text at hand is anonymous},
  url    = {https://openreview.net/forum?id=WVYJ0BaytpF},
  year   = {2022}
}"""

WU_2023_FAFED = """@inproceedings{wu2023fafed,
  title     = {Faster Adaptive Federated Learning},
  author    = {Wu, Xidong and Huang, Feihu and Hu, Zhengmian and Huang, Heng},
  booktitle = {Proceedings of the AAAI Conference on Artificial Intelligence},
  volume    = {37},
  pages     = {10379--10387},
  year      = {2023}
}"""

MCMAHAN_2017 = """@inproceedings{mcmahan2017communication,
  title     = {Communication-Efficient Learning of Deep Networks from Decentralized Data},
  author    = {McMahan, Brendan and Moore, Eider and Ramage, Daniel and Hampson, Seth and
               {Ag{\\"u}era y Arcas}, Blaise},
  booktitle = {Artificial Intelligence and Statistics},
  pages     = {1273--1282},
  publisher = {PMLR},
  year      = {2017}
}"""

LI_2020 = """@inproceedings{li2020federated,
  title     = {Federated Optimization in Heterogeneous Networks},
  author    = {Li, Tian and Sahu, Anit Kumar and Zaheer, Manzil and Sanjabi, Maziar and Talwalkar, Ameet and
               Smith, Virginia},
  booktitle = {Proceedings of Machine Learning and Systems},
  volume    = {2},
  pages     = {429--450},
  year      = {2020}
}"""

KARIMIREDDY_2020 = """@inproceedings{karimireddy2020scaffold,
  title     = {{SCAFFOLD}: Stochastic Controlled Averaging for Federated Learning},
  author    = {Karimireddy, Sai Praneeth and Kale, Satyen and Mohri, Mehryar and Reddi, Sashank and
               Stich, Sebastian and Suresh, Ananda Theertha},
  booktitle = {International Conference on Machine Learning},
  pages     = {5132--5143},
  publisher = {PMLR},
  year      = {2020}
}"""

KHANDURI_2021 = """@inproceedings{khanduri2021stem,
  title     = {{STEM}: A Stochastic Two-Sided Momentum Algorithm Achieving Near-Optimal Sample and
               Communication Complexities for Federated Learning},
  author    = {Khanduri, Prashant and Sharma, Pranay and Yang, Haibo and Hong, Mingyi and Liu, Jia and
               Rajawat, Ketan and Varshney, Pramod},
  booktitle = {Advances in Neural Information Processing Systems},
  volume    = {34},
  pages     = {6050--6061},
  year      = {2021}
}"""

REDDI_2021 = """@inproceedings{reddi2021adaptive,
  title     = {Adaptive Federated Optimization},
  author    = {Reddi, Sashank J. and Charles, Zachary and Zaheer, Manzil and Garrett, Zachary and
               Rush, Keith and Kone{\\v{c}}n{\\'y}, Jakub and Kumar, Sanjiv and McMahan, H. Brendan},
  booktitle = {International Conference on Learning Representations},
  year      = {2021}
}"""

WANG_2022 = """@inproceedings{wang2022communication,
  title     = {Communication-Efficient Adaptive Federated Learning},
  author    = {Wang, Yujia and Lin, Lu and Chen, Jinghui},
  booktitle = {International Conference on Machine Learning},
  pages     = {22802--22838},
  publisher = {PMLR},
  year      = {2022}
}"""

WANG_2022_SOX = """@inproceedings{wang2022finite,
  title     = {Finite-Sum Coupled Compositional Stochastic Optimization: Theory and Applications},
  author    = {Wang, Bokun and Yang, Tianbao},
  booktitle = {International Conference on Machine Learning},
  pages     = {23292--23317},
  publisher = {PMLR},
  year      = {2022}
}"""

HU_2020 = """@inproceedings{hu2020biased,
  title     = {Biased Stochastic First-Order Methods for Conditional Stochastic Optimization and
               Applications in Meta Learning},
  author    = {Hu, Yifan and Zhang, Siqi and Chen, Xin and He, Niao},
  booktitle = {Advances in Neural Information Processing Systems},
  volume    = {33},
  pages     = {2759--2770},
  year      = {2020}
}"""

WANG_2017 = """@article{wang2017stochastic,
  title   = {Stochastic Compositional Gradient Descent: Algorithms for Minimizing Compositions of
             Expected-Value Functions},
  author  = {Wang, Mengdi and Fang, Ethan X. and Liu, Han},
  journal = {Mathematical Programming},
  volume  = {161},
  number  = {1-2},
  pages   = {419--449},
  year    = {2017}
}"""

HUANG_2021 = """@article{huang2021compositional,
  title   = {Compositional Federated Learning: Applications in Distributionally Robust Averaging and
             Meta Learning},
  author  = {Huang, Feihu and Li, Junyi and Huang, Heng},
  journal = {arXiv preprint arXiv:2106.11264},
  year    = {2021}
}"""

WANG_2021 = """@article{wang2021memory,
  title   = {Memory-Based Optimization Methods for Model-Agnostic Meta-Learning},
  author  = {Wang, Bokun and Yuan, Zhuoning and Ying, Yiming and Yang, Tianbao},
  journal = {arXiv preprint arXiv:2106.04911},
  year    = {2021},
  note    = {Extended version: Journal of Machine Learning Research 24(145):1--46, 2023}
}"""

DENG_2021 = """@inproceedings{deng2021local,
  title     = {Local Stochastic Gradient Descent Ascent: Convergence Analysis and Communication Efficiency},
  author    = {Deng, Yuyang and Mahdavi, Mehrdad},
  booktitle = {International Conference on Artificial Intelligence and Statistics},
  pages     = {1387--1395},
  publisher = {PMLR},
  year      = {2021}
}"""

SHARMA_2022 = """@inproceedings{sharma2022federated,
  title     = {Federated Minimax Optimization: Improved Convergence Analyses and Algorithms},
  author    = {Sharma, Pranay and Panda, Rohan and Joshi, Gauri and Varshney, Pramod},
  booktitle = {International Conference on Machine Learning},
  pages     = {19683--19730},
  publisher = {PMLR},
  year      = {2022}
}"""

GUO_2020 = """@inproceedings{guo2020communication,
  title     = {Communication-Efficient Distributed Stochastic {AUC} Maximization with Deep Neural Networks},
  author    = {Guo, Zhishuai and Liu, Mingrui and Yuan, Zhuoning and Shen, Li and Liu, Wei and Yang, Tianbao},
  booktitle = {International Conference on Machine Learning},
  pages     = {3864--3874},
  publisher = {PMLR},
  year      = {2020}
}"""

YUAN_2021 = """@inproceedings{yuan2021federated,
  title     = {Federated Deep {AUC} Maximization for Heterogeneous Data with a Constant Communication
               Complexity},
  author    = {Yuan, Zhuoning and Guo, Zhishuai and Xu, Yi and Ying, Yiming and Yang, Tianbao},
  booktitle = {International Conference on Machine Learning},
  pages     = {12219--12229},
  publisher = {PMLR},
  year      = {2021}
}"""

CHEN_2020 = """@inproceedings{chen2020toward,
  title     = {Toward Communication Efficient Adaptive Gradient Method},
  author    = {Chen, Xiangyi and Li, Xiaoyun and Li, Ping},
  booktitle = {Proceedings of the 2020 ACM-IMS on Foundations of Data Science Conference},
  pages     = {119--128},
  year      = {2020}
}"""
WANG_2020 = """@inproceedings{wang2020tackling,
  title     = {Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization},
  author    = {Wang, Jianyu and Liu, Qinghua and Liang, Hao and Joshi, Gauri and Poor, H. Vincent},
  booktitle = {Advances in Neural Information Processing Systems},
  volume    = {33},
  pages     = {7611--7623},
  year      = {2020}
}"""

ACAR_2021 = """@inproceedings{acar2021federated,
  title     = {Federated Learning Based on Dynamic Regularization},
  author    = {Acar, Durmus Alp Emre and Zhao, Yue and Navarro, Ramon Matas and Mattina, Matthew and
               Whatmough, Paul N. and Saligrama, Venkatesh},
  booktitle = {International Conference on Learning Representations},
  year      = {2021}
}"""

LI_2021 = """@inproceedings{li2021ditto,
  title     = {Ditto: Fair and Robust Federated Learning Through Personalization},
  author    = {Li, Tian and Hu, Shengyuan and Beirami, Ahmad and Smith, Virginia},
  booktitle = {International Conference on Machine Learning},
  pages     = {6357--6368},
  publisher = {PMLR},
  year      = {2021}
}"""

COLLINS_2021 = """@inproceedings{collins2021exploiting,
  title     = {Exploiting Shared Representations for Personalized Federated Learning},
  author    = {Collins, Liam and Hassani, Hamed and Mokhtari, Aryan and Shakkottai, Sanjay},
  booktitle = {International Conference on Machine Learning},
  pages     = {2089--2099},
  publisher = {PMLR},
  year      = {2021}
}"""


LI_2020_FAIR = """@inproceedings{li2020fair,
  title     = {Fair Resource Allocation in Federated Learning},
  author    = {Li, Tian and Sanjabi, Maziar and Beirami, Ahmad and Smith, Virginia},
  booktitle = {International Conference on Learning Representations},
  year      = {2020}
}"""

LI_2021_TILTED = """@inproceedings{li2021tilted,
  title     = {Tilted Empirical Risk Minimization},
  author    = {Li, Tian and Beirami, Ahmad and Sanjabi, Maziar and Smith, Virginia},
  booktitle = {International Conference on Learning Representations},
  year      = {2021}
}"""

ROCKAFELLAR_2000 = """@article{rockafellar2000optimization,
  title   = {Optimization of Conditional Value-at-Risk},
  author  = {Rockafellar, R. Tyrrell and Uryasev, Stanislav},
  journal = {Journal of Risk},
  volume  = {2},
  number  = {3},
  pages   = {21--41},
  year    = {2000}
}"""


def bibtex(name: str) -> str:
    """Return the BibTeX entries of a method or an objective, by its name or alias."""
    key = name.strip().lower().replace("_", "-").replace(" ", "-")
    known = {**METHODS, **OBJECTIVES}
    known |= {alias: thing for thing in known.values() for alias in thing.aliases}
    if key not in known:
        raise unknown("method or objective", name, known)
    if not known[key].cites:
        raise NestfedError(f"There is nothing to cite for {key}: its class sets no `cites`.")
    return "\n\n".join(known[key].cites)
