{{- /* What parts are told about certificates; refuses what cannot work. */ -}}
{{- define "etude.tlsEnv" -}}
{{- $tls := .Values.tls -}}
- {name: ETUDE_TLS_MODE, value: {{ $tls.mode }}}
- {name: ETUDE_TLS_DOMAIN, value: {{ $tls.trustDomain | quote }}}
- {name: ETUDE_TLS_LIFETIME_HOURS, value: {{ $tls.certificateHours | quote }}}
{{- if eq $tls.mode "SelfManaged" }}
- {name: ETUDE_TLS_ISSUER, value: {{ include "etude.issuerTarget" . }}}
- {name: ETUDE_TLS_TRUST, value: /etc/etude-trust}
{{- else if eq $tls.mode "CertManager" }}
{{- if not (.Capabilities.APIVersions.Has "cert-manager.io/v1/Certificate") }}
{{- fail "tls.mode: this cluster serves no Certificate of cert-manager.io/v1: install cert-manager first, or take SelfManaged (with `helm template`, add --api-versions cert-manager.io/v1/Certificate)" }}
{{- end }}
{{- if not $tls.issuerRef.name }}
{{- fail "tls.issuerRef.name: CertManager needs the name of an issuer" }}
{{- end }}
- {name: ETUDE_TLS_ISSUER_NAME, value: {{ $tls.issuerRef.name | quote }}}
- {name: ETUDE_TLS_ISSUER_KIND, value: {{ $tls.issuerRef.kind | quote }}}
- {name: ETUDE_TLS_ISSUER_GROUP, value: {{ $tls.issuerRef.group | quote }}}
{{- else if eq $tls.mode "Secret" }}
{{- if not $tls.secretName }}
{{- fail "tls.secretName: Secret needs the name of one that every namespace with runs has, and this one" }}
{{- end }}
- {name: ETUDE_TLS_SECRET, value: {{ $tls.secretName | quote }}}
{{- end }}
{{- end -}}

{{- define "etude.issuer" -}}
{{ include "etude.name" . }}-issuer
{{- end -}}

{{- define "etude.issuerTarget" -}}
{{ include "etude.issuer" . }}.{{ .Release.Namespace }}.svc:7060
{{- end -}}

{{- define "etude.issuerSelector" -}}
app.kubernetes.io/name: etude
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: issuer
{{- end -}}

{{- define "etude.operatorIdentity" -}}
spiffe://{{ .Values.tls.trustDomain }}/ns/{{ .Release.Namespace }}/role/operator
{{- end -}}

{{- define "etude.caSecret" -}}
{{ .Values.tls.selfManaged.caSecret | default (printf "%s-ca" (include "etude.name" .)) }}
{{- end -}}

{{- /* Names of CAs that are believed: the one that was added last, and its predecessor. */ -}}
{{- define "etude.caNames" -}}
{{- $last := int .Values.tls.selfManaged.generation -}}
{{- range untilStep (int (max 1 (sub $last 1))) (int (add $last 1)) 1 }}
- ca-{{ . }}
{{- end }}
{{- end -}}

{{- /* Refuses a generation by which the CA that was added last would be lost: dict of root, known (what the
Secret holds). One is added at a time, and none is taken back. How long ago the last one was added is not known
here: its predecessor is forgotten with the next, and what that signed is refused unless two lives of a
certificate lie between (docs/how-to/encrypt-the-wire.md). */ -}}
{{- define "etude.checkGeneration" -}}
{{- $value := int .root.Values.tls.selfManaged.generation -}}
{{- $secret := printf "%s/%s" .root.Release.Namespace (include "etude.caSecret" .root) -}}
{{- $held := list -}}
{{- range $key := keys .known | sortAlpha -}}
{{- with regexFind "^ca-[1-9][0-9]*\\.crt$" $key -}}
{{- $held = append $held (trimPrefix "ca-" . | trimSuffix ".crt" | int) -}}
{{- end -}}
{{- end -}}
{{- if and .known (not $held) -}}
{{- fail (printf "tls.selfManaged.generation: Secret %s holds no CA (ca-1.crt and ca-1.key): delete it if nobody needs it, and Helm makes one" $secret) -}}
{{- end -}}
{{- if $held -}}
{{- $last := 0 -}}
{{- range $held -}}{{- $last = max $last . | int -}}{{- end -}}
{{- if not (has $value (list $last (int (add1 $last)))) -}}
{{- fail (printf "tls.selfManaged.generation: %d would throw away a CA of Secret %s that runs believe: the last of it is ca-%d. Set it to %d, or to %d to replace that one; to begin anew, delete the Secret when the last run is gone" $value $secret $last $last (int (add1 $last))) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* The CAs' certificates as files, never their keys. */ -}}
{{- define "etude.trustVolume" -}}
- name: trust
  secret:
    secretName: {{ include "etude.caSecret" . | quote }}
    items:
      {{- range include "etude.caNames" . | fromYamlArray }}
      - {key: {{ . }}.crt, path: {{ . }}.crt}
      {{- end }}
{{- end -}}

{{- define "etude.trustMount" -}}
- {name: trust, mountPath: /etc/etude-trust, readOnly: true}
{{- end -}}

{{- /* How the operator's own pod comes by its certificate. */ -}}
{{- define "etude.tlsVolumes" -}}
{{- $mode := .Values.tls.mode -}}
{{- if eq $mode "SelfManaged" }}
- {name: tls, emptyDir: {medium: Memory, sizeLimit: 1Mi}}
- name: tls-token
  projected:
    defaultMode: 0440
    sources:
      - serviceAccountToken:
          audience: {{ include "etude.operatorIdentity" . }}
          expirationSeconds: 3600
          path: token
{{- else if eq $mode "CertManager" }}
- {name: tls, secret: {secretName: {{ include "etude.name" . }}-operator-tls, defaultMode: 0440}}
{{- else if eq $mode "Secret" }}
- {name: tls, secret: {secretName: {{ .Values.tls.secretName | quote }}, defaultMode: 0440}}
{{- end }}
{{- end -}}

{{- define "etude.tlsSetting" -}}
- {name: ETUDE_TLS, value: {{ ternary "Plaintext" "/etc/etude-tls" (eq .Values.tls.mode "Plaintext") }}}
{{- end -}}

{{- define "etude.tlsMount" -}}
{{- if ne .Values.tls.mode "Plaintext" }}
- {name: tls, mountPath: /etc/etude-tls, readOnly: true}
{{- end }}
{{- end -}}

{{- /* The sidecar that keeps the operator's certificate fresh; the operator gives runs the same. */ -}}
{{- define "etude.keeper" -}}
- name: certificates
  image: {{ include "etude.image" (dict "root" . "role" "operator") | quote }}
  imagePullPolicy: {{ .Values.imagePullPolicy }}
  command: [python, -m, etude.common.tls.sidecar]
  restartPolicy: Always
  env:
    - {name: ETUDE_TLS_FOLDER, value: /etc/etude-tls}
    - {name: ETUDE_TLS_IDENTITY, value: {{ include "etude.operatorIdentity" . }}}
    - {name: ETUDE_TLS_ISSUER, value: {{ include "etude.issuerTarget" . }}}
    - {name: ETUDE_TLS_TOKEN, value: /var/run/etude-token/token}
    - {name: ETUDE_TLS_TRUST, value: /etc/etude-trust}
    - {name: ETUDE_HOST, value: "0.0.0.0"}
    - {name: ETUDE_PROBE_PORT, value: "8081"}
  ports:
    - {name: keeper, containerPort: 8081, protocol: TCP}
  startupProbe:
    httpGet: {path: /readyz, port: 8081}
    periodSeconds: 1
    timeoutSeconds: 5
    failureThreshold: 600
  terminationMessagePolicy: FallbackToLogsOnError
  securityContext: {{- include "etude.containerSecurity" . | nindent 4 }}
  resources:
    requests: {cpu: 5m, memory: 48Mi}
    limits: {memory: 128Mi}
  volumeMounts:
    - {name: tls, mountPath: /etc/etude-tls}
    - {name: tls-token, mountPath: /var/run/etude-token, readOnly: true}
    - {name: trust, mountPath: /etc/etude-trust, readOnly: true}
{{- end -}}

{{- /* The CAs' files, in base64: those that the cluster has, and a new one for a generation that it lacks. They are
made once for all that this chart renders. */ -}}
{{- define "etude.caData" -}}
{{- $own := .Values.tls.selfManaged -}}
{{- if not (hasKey $own "made") -}}
{{- $known := (lookup "v1" "Secret" .Release.Namespace (include "etude.caSecret" .)).data | default dict -}}
{{- $made := dict -}}
{{- if $own.caSecret -}}
{{- $made = $known -}}
{{- else -}}
{{- include "etude.checkGeneration" (dict "root" . "known" $known) -}}
{{- range include "etude.caNames" . | fromYamlArray -}}
{{- $crt := printf "%s.crt" . -}}
{{- $key := printf "%s.key" . -}}
{{- if hasKey $known $crt -}}
{{- $_ := set $made $crt (get $known $crt) -}}
{{- $_ := set $made $key (get $known $key) -}}
{{- else -}}
{{- $ca := genCA (printf "%s %s" (include "etude.name" $) .) (int $own.caDays) -}}
{{- $_ := set $made $crt ($ca.Cert | b64enc) -}}
{{- $_ := set $made $key ($ca.Key | b64enc) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $_ := set $own "made" $made -}}
{{- end -}}
{{ toJson $own.made }}
{{- end -}}

{{- /* Certificates of the CAs as data of a ConfigMap. */ -}}
{{- define "etude.nodeTrust" -}}
{{- $data := include "etude.caData" . | fromJson -}}
{{- range include "etude.caNames" . | fromYamlArray -}}
{{- $crt := printf "%s.crt" . -}}
{{- if not (hasKey $data $crt) -}}
{{- fail (printf "nodes.pools: the cluster has no Secret %s with %s, which pods of nodes.namespace must trust" (include "etude.caSecret" $) $crt) -}}
{{- end -}}
{{ $crt }}: {{ get $data $crt | b64dec | quote }}
{{ end -}}
{{- end -}}
