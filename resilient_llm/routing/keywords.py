"""Words that say what kind of work a question asks for, in ten languages, and how they are found in a text.

The tables are data, for anybody to correct or extend. What a word is worth is decided elsewhere.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final, Literal, TypeAlias, cast, get_args

from resilient_llm._options import instance_of, names, one_of
from resilient_llm.errors import ConfigurationError

__all__ = ["KEYWORDS", "Keywords", "Work"]

Work: TypeAlias = Literal["reasoning", "coding", "creation", "routine"]
"""A kind of work: to think something through, to program, to write something new, or what a small model can do."""

KEYWORDS: Final[Mapping[Work, Mapping[str, str]]] = MappingProxyType(
    {
        "reasoning": {
            "en": "analy* prove proof derive compare contrast evaluat* assess* trade_off trade_offs tradeoff* "
            "step_by_step strateg* plan optimi* diagnos* hypothes* theorem* equation* probabilit* calculat* "
            "pros_and_cons root_cause critique justify solve architect* in_depth investigat* implication* "
            "explain_why think_through",
            "de": "analysier* analyse* beweis* herleit* vergleich* bewert* abwäg* schritt_für_schritt strategi* "
            "optimier* begründ* hypothes* gleichung* wahrscheinlichkeit* berechn* vor_und_nachteile ursache* "
            "löse architektur* untersuch*",
            "fr": "analys* prouv* démontr* preuve* compar* évalu* étape_par_étape pas_à_pas stratégi* optimis* "
            "justifi* hypothès* équation* probabilit* calcul* avantages_et_inconvénients résou* architectur* "
            "raisonn*",
            "es": "analiz* análisis demuestr* demostr* compar* evalu* paso_a_paso estrategi* optimiz* justific* "
            "hipótesis ecuacion* probabilidad* calcul* ventajas_y_desventajas pros_y_contras resuelv* resolver "
            "arquitectur* razona*",
            "pt": "analis* análise* demonstr* prove compar* avali* passo_a_passo estratégi* otimiz* justifi* "
            "hipótese* equaç* probabilidade* calcul* vantagens_e_desvantagens resolv* arquitetur* raciocin*",
            "it": "analizz* analisi dimostr* confront* valut* passo_dopo_passo passo_per_passo strategi* "
            "ottimizz* giustific* ipotesi equazion* probabilit* calcol* pro_e_contro risolv* architettur* "
            "ragiona*",
            "ru": "анализ* проанализ* докаж* доказ* сравн* оцен* пошагов* шаг_за_шагом стратег* оптимиз* обосн* "
            "гипотез* уравнен* вероятност* рассчита* вычисл* плюсы_и_минусы реши решите решить архитектур*",
            "zh": "分析 证明 證明 推导 推導 比较 比較 评估 評估 逐步 一步一步 策略 优化 優化 为什么 為什麼 "
            "假设 假設 方程 概率 计算 計算 利弊 解决 解決 架构 架構 推理",
            "ja": "分析 証明 導出 比較 評価 段階的 ステップバイステップ 戦略 最適化 なぜ 仮説 方程式 確率 計算 "
            "長所と短所 解いて 考察 推論 設計",
            "ko": "분석 증명 도출 비교 평가 단계별 전략 최적화 가설 방정식 확률 계산 장단점 추론 설계",
        },
        "coding": {
            "en": "code coding function* algorithm* debug* refactor* compil* implement* regex sql python javascript "
            "typescript java rust golang api bug bugs script* exception* traceback stack_trace unit_test "
            "unit_tests codebase programming docker* kubernetes html css bash async pull_request",
            "de": "programmier* quellcode quelltext funktion* algorithm* fehlermeldung* skript* implementier*",
            "fr": "programm* fonction* algorithm* implément* débog* code_source script*",
            "es": "programar programación función funciones algoritm* implement* depur* código",
            "pt": "programar programação função funções algoritm* implement* depur* código",
            "it": "programmare programmazione funzione funzioni algoritm* implement* codice",
            "ru": "код кода коде функци* алгоритм* программ* отлад* скрипт* рефактор* реализу* реализова*",
            "zh": "代码 代碼 编程 編程 程式 函数 函數 算法 演算法 调试 調試 重构 重構 实现 實現 脚本 腳本 报错 正则",
            "ja": "コード プログラム 関数 アルゴリズム デバッグ リファクタ 実装 スクリプト 正規表現",
            "ko": "코드 프로그래밍 함수 알고리즘 디버그 디버깅 리팩터 구현 스크립트 정규식",
        },
        "creation": {
            "en": "write essay* story stories poem* novel* draft* compose blog speech screenplay lyrics slogan* "
            "brainstorm* proposal article*",
            "de": "schreib* verfass* aufsatz geschichte* gedicht* entwurf entwirf drehbuch artikel",
            "fr": "écri* rédig* dissertation histoire* poème* roman discours scénario brouillon article*",
            "es": "escrib* redact* ensayo* historia* cuento* poema* novela discurso guion borrador artículo*",
            "pt": "escrev* redij* redação ensaio* história* conto poema* romance discurso roteiro rascunho artigo*",
            "it": "scriv* redig* saggio storia racconto poesia romanzo discorso sceneggiatura bozza articolo",
            "ru": "напиш* напис* сочин* эссе рассказ* стих* роман речь сценари* черновик статья статью",
            "zh": "写一 寫一 撰写 撰寫 作文 故事 诗 詩 小说 小說 文章 演讲 演講 剧本 劇本 创作 創作",
            "ja": "書いて 執筆 作文 物語 詩 小説 エッセイ 記事 創作 スピーチ",
            "ko": "써줘 작성 에세이 이야기 소설 기사 대본 창작 연설",
        },
        "routine": {
            "en": "translat* summari* classify categori* label sentiment extract* define spell* capital_of yes_or_no "
            "true_or_false hello hi thanks thank_you what_is who_is convert one_word in_one_sentence tldr tl_dr",
            "de": "übersetz* zusammenfass* fasse klassifizier* kategori* stimmung extrahier* definier* ja_oder_nein "
            "hallo danke was_ist wer_ist hauptstadt in_einem_satz",
            "fr": "tradui* résum* classifi* catégori* extrai* défini* oui_ou_non bonjour salut merci qu'est_ce "
            "capitale en_une_phrase",
            "es": "traduc* traduz* resum* clasific* categor* extrae extraer defin* sí_o_no hola gracias capital_de "
            "en_una_frase",
            "pt": "traduz* resum* classific* categor* extrai* extrair defin* sim_ou_não olá obrigad* o_que_é quem_é "
            "em_uma_frase",
            "it": "tradu* riassum* classific* categor* estrai estrarre defin* sì_o_no ciao grazie cos'è capitale "
            "in_una_frase",
            "ru": "перевед* перевод* резюмир* кратко классифиц* категори* извлек* определи да_или_нет привет "
            "спасибо что_такое кто_такой столица",
            "zh": "翻译 翻譯 总结 總結 摘要 分类 分類 提取 定义 定義 是否 你好 谢谢 謝謝 是什么 是什麼 是谁 首都 "
            "一句话",
            "ja": "翻訳 要約 分類 抽出 定義 こんにちは ありがとう とは何 って何 首都 一言で",
            "ko": "번역 요약 분류 추출 정의 안녕 감사합니다 고마워 무엇인가 뭐야 수도 한_문장",
        },
    }
)
"""Words by kind of work and language. `*` stands for any ending, `_` for a space; case and accents count for nothing.

Where a script puts no spaces between words (Chinese, Japanese) or joins endings to them (Korean), a word is found
anywhere; elsewhere it has to be a whole word, or the beginning of one.
"""

_WORD = re.compile(r"[^\W_]+")  # of "l'algorithme" it is the second that counts
_ACCENTS = re.compile("[\u0300-\u036f]")
_UNSPACED = re.compile("[\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff]")  # Han, kana, Hangul


class Keywords:
    """Find words of several kinds of work in a text.

    `words` are the words of each kind, written as in `KEYWORDS`, all languages together. The time it takes is linear
    in the length of the text. Raises `ConfigurationError` for a kind that there is not, and for a word of nothing.
    """

    def __init__(self, words: Mapping[Work, Iterable[str]]) -> None:
        self._whole: dict[str, Work] = {}
        self._beginnings: dict[str, Work] = {}
        self._phrases: dict[str, Work] = {}
        self._anywhere: dict[str, Work] = {}
        for work, listed in _checked("words", words).items():
            for word in listed:
                self._add(word, work)
        self._lengths = sorted(set(map(len, self._beginnings)))

    @classmethod
    def default(cls, more: Mapping[Work, Iterable[str]] | None = None) -> Keywords:
        """Make one that finds `KEYWORDS`, and `more`."""
        words = {
            work: [word for line in table.values() for word in line.split()]
            for work, table in KEYWORDS.items()
        }
        for work, listed in _checked("more", {} if more is None else more).items():
            words.setdefault(work, []).extend(listed)
        return cls(words)

    def _add(self, word: str, work: Work) -> None:
        written = word.removesuffix("*").replace("_", " ").strip().casefold()
        if not written:
            raise ConfigurationError(f"words={word!r}: allowed are words, with '*' for any ending")
        if _UNSPACED.search(written):
            self._anywhere[written] = work
        elif len(words := _words(_plain(written))) > 1:
            self._phrases[f" {' '.join(words)} "] = work
        elif word.endswith("*"):
            self._beginnings[_plain(written)] = work
        else:
            self._whole[_plain(written)] = work

    def find(self, text: str) -> Mapping[Work, int]:
        """Give how many different words of each kind there are in a text."""
        text = text.casefold()
        listed = _words(_plain(text))
        words = set(listed)
        # Several beginnings may fit a word (analy*, analys*): words of the text count, not those of the tables.
        found: set[tuple[str, Work]] = {(word, self._whole[word]) for word in words & self._whole.keys()}
        for length in self._lengths:
            found |= {
                (word, self._beginnings[word[:length]]) for word in words if word[:length] in self._beginnings
            }
        spaced = f" {' '.join(listed)} "
        found |= {(phrase, work) for phrase, work in self._phrases.items() if phrase in spaced}
        if _UNSPACED.search(text):
            found |= {(word, work) for word, work in self._anywhere.items() if word in text}
        counts: dict[Work, int] = {}
        for _, work in found:
            counts[work] = counts.get(work, 0) + 1
        return counts


def _checked(option: str, words: Mapping[Work, Iterable[str]]) -> Mapping[Work, Collection[str]]:
    """Give the words of each kind of work, once it is sure that they are such."""
    instance_of(Mapping, none=False, **{option: words})
    checked: dict[Work, Collection[str]] = {}
    for work, listed in words.items():
        one_of(get_args(Work), **{option: work})
        checked[work] = tuple(listed) if isinstance(listed, Iterator) else cast("Collection[str]", listed)
        names(**{f"{option}[{work!r}]": checked[work]})
    return checked


def _plain(text: str) -> str:
    """Take away the accents."""
    return text if text.isascii() else _ACCENTS.sub("", unicodedata.normalize("NFKD", text))


def _words(text: str) -> list[str]:
    return _WORD.findall(text)
